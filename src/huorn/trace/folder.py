"""A trace folder that is being filled: prompt after prompt into chunks, so that a killed recording goes on where it was."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from huorn.errors import TraceError, UsageError, reason
from huorn.files import PART_SUFFIX
from huorn.memory import format_bytes
from huorn.trace.chunk_writer import ChunkWriter
from huorn.trace.layout import MANIFEST
from huorn.trace.manifest import Manifest, PromptEntry, write_manifest
from huorn.trace.recording import Traces

# What a killed recording leaves behind: a chunk that was not finished, a manifest that was not renamed.
_PARTIAL = re.compile(r"\.chunk-\d{5}\.partial|\.huorn-[0-9a-f]{16}" + re.escape(PART_SUFFIX))

# Writes all rows of the prompt with this index into the chunk.
WritePrompt = Callable[[int, ChunkWriter], None]


class TraceFolder:
    """A folder with a manifest that says what is to be recorded; `open_folder` makes one."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        """Takes what `open_folder` has checked."""
        self.folder = folder
        self.manifest = manifest

    def fill(self, write_prompt: WritePrompt, progress: Callable[[int, int], None]) -> None:
        """Records every prompt that is in no chunk, in order; a chunk is closed behind the prompt that fills it.

        progress(prompts done, prompts in all), whole chunks or not. However it ends, chunks in the manifest are whole, and a call
        later gives the files that one call would have given. Raises what `write_prompt` raises, and TraceError.
        """
        if not (self.folder / MANIFEST).exists():
            write_manifest(self.folder, self.manifest)
        try:
            while self.manifest.recorded < len(self.manifest.prompts):
                self._remove_leftovers()
                writer = ChunkWriter(self.folder, len(self.manifest.chunks), self.manifest)
                try:
                    found = self._write_chunk(writer, write_prompt, progress)
                    self._commit(writer, found)
                finally:
                    with suppress(TraceError):  # of files that are removed below
                        writer.close()
        finally:
            self._remove_leftovers()  # also of a writer that Ctrl-C met while it was made

    def check_room(self, rows: int) -> None:
        """Raises UsageError when the disk has no room for `rows` more rows."""
        needed = rows * self.manifest.row_bytes
        free = shutil.disk_usage(self.folder).free
        if needed > free:
            raise UsageError(
                f"up to {rows:,} rows need {format_bytes(needed)}, but the disk of {self.folder} has {format_bytes(free)} free: "
                "give fewer prompts or --tokens, or an --out on a larger disk"
            )

    def _write_chunk(
        self, writer: ChunkWriter, write_prompt: WritePrompt, progress: Callable[[int, int], None]
    ) -> list[tuple[int, int]]:
        """(first row, rows) of the prompts from the first unrecorded one on, until the chunk is full."""
        found = list[tuple[int, int]]()
        done, total = self.manifest.recorded, len(self.manifest.prompts)
        progress(done, total)
        while done + len(found) < total and writer.rows < self.manifest.chunk_rows:
            first = writer.rows
            write_prompt(done + len(found), writer)
            found.append((first, writer.rows - first))
            progress(done + len(found), total)
        return found

    def _commit(self, writer: ChunkWriter, found: list[tuple[int, int]]) -> None:
        """The chunk under its name, then the manifest that knows it. Prompts without a row at the end go to the chunk before."""
        manifest = self.manifest
        if writer.rows:
            chunks, offset = (*manifest.chunks, writer.finish()), 0
        else:
            chunks = manifest.chunks
            if not chunks:
                raise TraceError(
                    "no prompt gives a row: each ends with its first token, so there is nothing to record"
                )
            offset = chunks[-1].rows
        prompts, done = list(manifest.prompts), manifest.recorded
        for index, (first, rows) in enumerate(found, done):
            place = {"chunk": len(chunks) - 1, "first_row": offset + first, "rows": rows}
            prompts[index] = prompts[index].model_copy(update=place)
        self.manifest = manifest.model_copy(update={"prompts": tuple(prompts), "chunks": chunks})
        write_manifest(self.folder, self.manifest)

    def _remove_leftovers(self) -> None:
        """Unfinished chunks, and one that was finished but never came into the manifest."""
        try:
            for path in sorted(self.folder.iterdir()):
                unknown = path.name == f"chunk-{len(self.manifest.chunks):05d}"
                if _PARTIAL.fullmatch(path.name) or unknown:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
        except OSError as error:
            raise TraceError(f"{error.filename} can not be removed: {reason(error)}") from error


@contextmanager
def open_folder(folder: Path, wanted: Manifest) -> Iterator[TraceFolder]:
    """The folder of a new trace, or of one that an earlier call with the same `wanted` (which knows no chunk) has begun.

    Nobody else can fill it meanwhile, and nothing is written before `fill`: a folder that was made is removed again where it is
    empty at the end. Raises UsageError when it holds something else or can not be written; TraceError when another recording is
    in it, by the name of what differs, or when it is damaged.
    """
    try:
        made = not folder.exists()
        folder.mkdir(exist_ok=True)
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise UsageError(
            f"--out {folder} can not be made: {reason(error)}; name a new folder in one that exists"
        ) from error
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UsageError(f"--out {folder} is being written by another huorn: wait for it") from error
        yield TraceFolder(folder, _begun(folder, wanted))
    finally:
        os.close(fd)  # the lock goes with it
        if made:
            with suppress(OSError):  # it holds what was recorded
                folder.rmdir()


def _begun(folder: Path, wanted: Manifest) -> Manifest:
    """The manifest of what is there, after it was compared; the wanted one where nothing is."""
    try:
        others = [path.name for path in folder.iterdir() if not _PARTIAL.fullmatch(path.name)]
    except OSError as error:
        raise UsageError(f"--out {folder} can not be read: {reason(error)}") from error
    if others and MANIFEST not in others:
        raise UsageError(f"--out {folder} is not empty and holds no trace: name a new or empty folder")
    if not others:
        return wanted
    there = Traces.open(folder).manifest
    _refuse_other(folder, there, wanted)
    return there


def _refuse_other(folder: Path, there: Manifest, wanted: Manifest) -> None:
    compared = [
        ("model", there.model.fingerprint or there.model, wanted.model.fingerprint or wanted.model),
        ("mode", there.mode, wanted.mode),
        ("file of prompts" if wanted.mode != "import" else "file", there.source.sha256, wanted.source.sha256),
        ("--tokens", there.tokens, wanted.tokens),
        ("--precision", there.precision, wanted.precision),
        ("instruction set", there.isa, wanted.isa),
        ("--chunk-rows", there.chunk_rows, wanted.chunk_rows),
        ("set of captured fields", there.captured, wanted.captured),
        ("tokenizer or split", *(tuple(map(_identity, each.prompts)) for each in (there, wanted))),
    ]
    for name, before, now in compared:
        if before != now:
            short = isinstance(before, str | int) and len(str(before)) < 40
            values = f" ({before} there, {now} here)" if short else ""
            raise TraceError(
                f"--out {folder} holds a recording of another {name}{values}: go on with that, or name a new folder"
            )


def _identity(prompt: PromptEntry) -> tuple[str, str, int, int]:
    return prompt.sha256, prompt.split, prompt.group, prompt.prompt_tokens
