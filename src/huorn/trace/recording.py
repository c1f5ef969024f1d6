"""Reading a trace: `traces = Traces.open(folder)`, then `traces.split("train")`, `chunk.rows` and `chunk.layer(n)`.

A row of a prompt says: the token `id` was read at `position`, `next_id` came after it, and in the file of each layer, at the same
place, what that layer routed for it.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from huorn.errors import TraceError, reason
from huorn.trace.layout import ROW, ROWS, layer_file
from huorn.trace.manifest import SPLITS, ChunkEntry, Manifest, Split, read_manifest

_PIECE_BYTES = 8 << 20


@dataclass(frozen=True, eq=False)
class Chunk:
    """Some whole prompts, their rows one after the other; files are mapped when they are asked for, read-only."""

    folder: Path
    entry: ChunkEntry
    record: np.dtype[Any]
    layers: int

    @property
    def count(self) -> int:
        """Rows."""
        return self.entry.rows

    @cached_property
    def rows(self) -> np.memmap[Any, np.dtype[Any]]:
        """Structured [count] of ROW: prompt, step, position, id, next_id. TraceError when it can not be mapped."""
        return self._map(ROWS, ROW)

    def layer(self, number: int) -> np.memmap[Any, np.dtype[Any]]:
        """Structured [count] of what was captured in this layer (layout.layer_record), row by row as `rows`.

        Mapped anew with each call: 40 layers of 1,000 chunks would be most of the mappings that Linux lets a process have.
        TraceError when it can not be mapped; IndexError for a layer that the model does not have.
        """
        if not 0 <= number < self.layers:
            raise IndexError(f"layer {number} of {self.layers}")
        return self._map(layer_file(number), self.record)

    def _map(self, name: str, record: np.dtype[Any]) -> np.memmap[Any, np.dtype[Any]]:
        path = self.folder / name
        try:
            return np.memmap(path, dtype=record, mode="r", shape=(self.count,))
        except (OSError, ValueError) as error:  # ValueError: it is shorter than when it was opened
            raise TraceError(f"{path} can not be mapped: {reason(error)}") from error


@dataclass(frozen=True, eq=False)
class PromptRows:
    """The rows [first, first + count) of `chunk`, steps 0 to count - 1 of prompt number `prompt` of the manifest."""

    prompt: int
    chunk: Chunk
    first: int
    count: int


@dataclass(frozen=True, eq=False)
class Traces:
    """An opened trace; `Traces.open` makes one."""

    folder: Path
    manifest: Manifest
    chunks: Sequence[Chunk]

    @classmethod
    def open(cls, folder: Path) -> Traces:
        """Reads the manifest and looks at the size of every file; no row is read, and chunks that a recording has not finished
        are no part of it.

        Raises TraceError when `folder` is no trace, of an unknown schema, or lacks a file or a part of one.
        """
        manifest = read_manifest(folder)
        record, layers = manifest.record, manifest.model.layers
        chunks = [Chunk(folder / entry.name, entry, record, layers) for entry in manifest.chunks]
        for chunk in chunks:
            _check_sizes(chunk)
        return cls(folder, manifest, chunks)

    def split(self, name: Split) -> list[PromptRows]:
        """The recorded prompts of a split that have rows, in the order of the manifest."""
        return [
            PromptRows(number, self.chunks[prompt.chunk], prompt.first_row, prompt.rows)
            for number, prompt in enumerate(self.manifest.prompts)
            if prompt.split == name and prompt.chunk is not None and prompt.rows
        ]

    def verify(self, progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Reads everything; progress(bytes done, bytes in all).

        Raises TraceError naming the first file whose SHA-256 is not that of the manifest, or that holds rows which no recording
        writes (NaN, infinity, an expert that does not exist, rows of another prompt or step), with the row.
        """
        total = sum(file.bytes for chunk in self.chunks for file in chunk.entry.files.values())
        done = 0
        by_chunk = defaultdict[int, list[PromptRows]](list)
        for split in SPLITS:
            for prompt in self.split(split):
                by_chunk[id(prompt.chunk)].append(prompt)
        for chunk in self.chunks:
            for name, file in chunk.entry.files.items():
                path = chunk.folder / name
                if _sha256(path) != file.sha256:
                    raise TraceError(f"{path} is damaged: its SHA-256 is not that of the manifest")
                if name != ROWS:
                    self._check_values(path, chunk._map(name, chunk.record))
                done += file.bytes
                progress(done, total)
            _check_rows(chunk, by_chunk[id(chunk)])

    def _check_values(self, path: Path, records: NDArray[Any]) -> None:
        step = max(1, _PIECE_BYTES // records.dtype.itemsize)
        for first in range(0, len(records), step):
            part = records[first : first + step]
            for field in part.dtype.names or ():
                if field == "ids":
                    bad = (part[field] < 0) | (part[field] >= self.manifest.model.experts)
                else:
                    bad = ~np.isfinite(part[field])
                rows = np.flatnonzero(bad.any(axis=1))
                if len(rows):
                    what = "an expert that does not exist" if field == "ids" else "NaN or infinity"
                    raise TraceError(f"{path} holds {what} in {field} of row {first + int(rows[0])}")


def _check_rows(chunk: Chunk, prompts: Sequence[PromptRows]) -> None:
    wanted = np.full((chunk.count, 2), -1)
    for prompt in prompts:
        own = slice(prompt.first, prompt.first + prompt.count)
        wanted[own, 0], wanted[own, 1] = prompt.prompt, np.arange(prompt.count)
    wrong = np.flatnonzero((chunk.rows["prompt"] != wanted[:, 0]) | (chunk.rows["step"] != wanted[:, 1]))
    if len(wrong):
        path = chunk.folder / ROWS
        raise TraceError(f"{path} has another prompt or step in row {int(wrong[0])} than the manifest")


def _check_sizes(chunk: Chunk) -> None:
    for name, file in chunk.entry.files.items():
        path = chunk.folder / name
        wanted = chunk.count * (ROW if name == ROWS else chunk.record).itemsize
        if file.bytes != wanted:
            raise TraceError(
                f"{path} should have {wanted} bytes for {chunk.count} rows, but the manifest says {file.bytes}"
            )
        try:
            found = path.stat().st_size
        except OSError as error:
            raise TraceError(f"{path} is missing or can not be read: {reason(error)}") from error
        if found != wanted:
            raise TraceError(f"{path} has {found} bytes instead of {wanted}: it was cut short or changed")


def _sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise TraceError(f"{path} can not be read: {reason(error)}") from error
