"""`huorn verify`: every tensor present, of the right shape and dtype, readable, free of NaN and of damaged scales."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from huorn.checkpoint.contents import read_contents
from huorn.checkpoint.fp8 import scale_damage
from huorn.checkpoint.manifest import FileSum, find_manifest, read_manifest
from huorn.checkpoint.names import SCALE, SCALE_SUFFIX
from huorn.checkpoint.safetensors_file import DTYPES, SafetensorsFile, TensorInfo
from huorn.checkpoint.shards import refuse_other_kinds
from huorn.checkpoint.tensor_check import kind_of
from huorn.errors import CheckpointError

Progress = Callable[[int, int], None]  # bytes read so far, bytes to read

_CHUNK = 8 * 2**20  # 2 to 16 MiB read equally fast; a multiple of every element size

# dtype -> the integers to look at, and the bits that are all set in NaN (and infinity, where there is one).
_NOT_FINITE = {
    "F32": (torch.int32, 0x7F800000),
    "BF16": (torch.int16, 0x7F80),
    "F8_E4M3": (torch.uint8, 0x7F),
}


@dataclass
class VerifyReport:
    """What `verify` found. `problems` has one sentence each; empty means that the checkpoint is whole."""

    directory: Path
    manifest: Path | None = None
    problems: list[str] = field(default_factory=list)
    tensors_by_kind: Counter[str] = field(default_factory=Counter)
    tensors_by_dtype: Counter[str] = field(default_factory=Counter)
    bytes_read: int = 0
    checksums_matched: int = 0

    @property
    def ok(self) -> bool:
        """Whether the checkpoint is whole."""
        return not self.problems


def verify(directory: Path, manifest: Path | None, progress: Progress) -> VerifyReport:
    """Reads every byte of every tensor once, in file order, and holds 8 MiB at most.

    Without `manifest`, one that lies in the folder is used. What is wrong with the checkpoint goes into the
    report; a folder that is none, and a manifest that can not be used, raise CheckpointError.
    """
    refuse_other_kinds(directory)
    report = VerifyReport(directory, manifest or find_manifest(directory))
    sums = {} if report.manifest is None else read_manifest(report.manifest)
    try:
        contents = read_contents(directory)
    except CheckpointError as error:
        report.problems.append(str(error))
        return report
    report.problems += contents.problems
    report.tensors_by_kind.update(map(kind_of, contents.infos))
    report.tensors_by_dtype.update(info.dtype for info in contents.infos.values())
    total = sum(info.nbytes for info in contents.infos.values())
    for name, file in contents.files.items():
        _read_shard(file, sums.get(name), report, lambda: progress(report.bytes_read, total))
    _check_other_files(directory, {n: s for n, s in sums.items() if n not in contents.files}, report)
    return report


def _read_shard(
    file: SafetensorsFile, expected: FileSum | None, report: VerifyReport, advanced: Callable[[], None]
) -> None:
    """Reads header and tensors in file order, which together are the whole file and give its checksum."""
    digest = hashlib.sha256() if expected is not None else None
    buffer = torch.empty(_CHUNK, dtype=torch.uint8)
    try:
        for start in range(0, file.data_start, _CHUNK):
            part = buffer[: min(_CHUNK, file.data_start - start)]
            _read_part(file, part, start, "the header", digest)
        for info in sorted(file.infos.values(), key=lambda info: info.start):
            finite, scales = True, None
            for offset in range(0, info.nbytes, _CHUNK):
                part = buffer[: min(_CHUNK, info.nbytes - offset)]
                _read_part(file, part, info.start + offset, info.name, digest)
                finite = finite and _is_finite(part, info)
                if info.name.endswith(SCALE_SUFFIX) and info.dtype in SCALE:
                    scales = scales or scale_damage(part.view(DTYPES[info.dtype]))
                report.bytes_read += part.numel()
                advanced()
            if not finite:
                report.problems.append(f"{file.path}: {info.name} holds NaN or infinity; the file is damaged")
            elif scales is not None:
                report.problems.append(f"{file.path}: {info.name} has {scales}; the file is damaged")
    except CheckpointError as error:
        report.problems.append(str(error))
        return
    if expected is not None and digest is not None:
        _compare(file.path, file.size, digest.hexdigest(), expected, report)


def _read_part(
    file: SafetensorsFile, part: Tensor, start: int, what: str, digest: hashlib._Hash | None
) -> None:
    file.read_into(part.numpy().data, start, what)
    if digest is not None:
        digest.update(part.numpy().data)


def _is_finite(part: Tensor, info: TensorInfo) -> bool:
    """Whether no element of `part` (uint8, whole elements of `info`) is NaN or infinite."""
    if info.dtype not in _NOT_FINITE:
        return True
    integers, mask = _NOT_FINITE[info.dtype]
    return bool((part.view(integers) & mask).max() != mask)


def _check_other_files(directory: Path, sums: Mapping[str, FileSum], report: VerifyReport) -> None:
    """Checksums of the manifest's files that hold no tensors: config, tokenizer, index."""
    for name, expected in sums.items():
        path = directory / name
        try:
            if not path.is_file():
                report.problems.append(f"{path} is missing; the manifest lists it")
                continue
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256")
            _compare(path, path.stat().st_size, digest.hexdigest(), expected, report)
        except OSError as error:
            report.problems.append(f"{path} can not be read: {error.strerror}")


def _compare(path: Path, size: int, sha256: str, expected: FileSum, report: VerifyReport) -> None:
    if expected.size not in (None, size):
        report.problems.append(f"{path} has {size} bytes, the manifest says {expected.size}")
    elif sha256 != expected.sha256:
        report.problems.append(f"{path} has SHA-256 {sha256}, the manifest says {expected.sha256}")
    else:
        report.checksums_matched += 1
