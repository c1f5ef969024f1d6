"""One chunk of a trace while it is written: appended to as rows come, and in place under its name only when it is whole."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from huorn.errors import TraceError, reason
from huorn.trace.layout import ROW, ROWS, chunk_folder, layer_file
from huorn.trace.manifest import ChunkEntry, FileEntry, Manifest


class ChunkWriter:
    """Writes rows.bin and one file per layer into `.chunk-00003.partial`. Nothing of a row is kept in memory.

    All methods raise TraceError, naming the file, where the disk refuses.
    """

    def __init__(self, folder: Path, number: int, manifest: Manifest) -> None:
        """Makes the partial folder, which must not be there."""
        self.manifest = manifest
        self.rows = 0
        self._folder = folder
        self._name = chunk_folder(number)
        self._partial = folder / f".{self._name}.partial"
        self._layers = [layer_file(layer) for layer in range(manifest.model.layers)]
        self._files: dict[str, _HashedFile] = {}
        try:
            self._partial.mkdir()
        except OSError as error:
            raise TraceError(f"{self._partial} can not be made: {reason(error)}") from error
        self._files = {name: _HashedFile(self._partial / name) for name in (ROWS, *self._layers)}

    def add_rows(self, rows: NDArray[Any]) -> None:
        """Appends structured [T] of ROW."""
        assert rows.dtype == ROW
        self._files[ROWS].write(rows)
        self.rows += len(rows)

    def add_layer(self, layer: int, **fields: NDArray[Any]) -> None:
        """Appends what one layer did for T rows: every captured field, [T, its width] and finite.

        OverflowError that says which value is beyond F16: it ends the recording, since infinity would end a training later.
        """
        record = self.manifest.record
        records = np.empty(len(fields["ids"]), record)
        for name in record.names or ():
            values = fields[name]
            with np.errstate(over="ignore"):
                records[name] = values
            if name != "ids" and not np.isfinite(records[name]).all():
                worst = float(values.ravel()[np.argmax(np.abs(values))])  # argmax finds NaN first
                kind = (
                    "hidden state" if name == "hidden" else "router logit" if name == "logits" else "weight"
                )
                limit = (
                    "" if name == "weights" else f", and a trace holds up to {np.finfo(np.float16).max:.0f}"
                )
                raise OverflowError(f"layer {layer} has a {kind} of {worst:g}{limit}")
        self._files[self._layers[layer]].write(records)

    def finish(self) -> ChunkEntry:
        """Everything on the disk and the folder under its own name, with what the manifest says of it."""
        entries = {name: file.finish() for name, file in self._files.items()}
        self._check_lengths(entries)
        try:
            sync_folder(self._partial)
            self._partial.rename(self._folder / self._name)
            sync_folder(self._folder)
        except OSError as error:
            raise TraceError(f"{self._folder / self._name} can not be written: {reason(error)}") from error
        return ChunkEntry(name=self._name, rows=self.rows, files=entries)

    def close(self) -> None:
        """Closes the files of a chunk that was not finished; whoever comes next removes them."""
        for file in self._files.values():
            file.close()

    def _check_lengths(self, entries: Mapping[str, FileEntry]) -> None:
        for name, entry in entries.items():
            size = (ROW if name == ROWS else self.manifest.record).itemsize
            assert entry.bytes == self.rows * size, f"{name}: every layer gets every row"


class _HashedFile:
    """A file that is written from front to back; its checksum grows with it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._digest = hashlib.sha256()
        self._bytes = 0
        self._file: BinaryIO
        try:
            self._file = path.open("xb")
        except OSError as error:
            raise TraceError(f"{path} can not be made: {reason(error)}") from error

    def write(self, records: NDArray[Any]) -> None:
        data = records.view(np.uint8).data
        try:
            self._file.write(data)
        except OSError as error:
            raise self._refused(error) from error
        self._digest.update(data)
        self._bytes += len(data)

    def finish(self) -> FileEntry:
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
        except OSError as error:
            raise self._refused(error) from error
        return FileEntry(bytes=self._bytes, sha256=self._digest.hexdigest())

    def close(self) -> None:
        try:
            self._file.close()
        except OSError as error:  # what was buffered did not fit either
            raise self._refused(error) from error

    def _refused(self, error: OSError) -> TraceError:
        return TraceError(f"{self._path} can not be written: {reason(error)}; whole chunks are kept")


def sync_folder(folder: Path) -> None:
    """Has the names in `folder` on the disk. Raises OSError."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
