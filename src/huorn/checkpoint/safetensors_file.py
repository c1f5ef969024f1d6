"""One safetensors file: header, zero-copy views, and reads into fresh memory.

The header is parsed here rather than by the safetensors package because experts are read straight from their
offsets, and because every error must name file and tensor.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import weakref
from collections import Counter
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from huorn.checkpoint.config import LFS_POINTER
from huorn.errors import CheckpointError, reason

DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
}
# Other dtypes of the format: known so that a file which holds them is not called damaged. Sizes in bits.
_ITEM_BITS = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4,
    "F6_E2M3": 6, "F6_E3M2": 6, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "C64": 64,
    "I64": 64, "U64": 64, "I32": 32, "U32": 32, "I16": 16, "U16": 16, "I8": 8, "U8": 8, "BOOL": 8,
}  # fmt: skip
_LARGEST_HEADER = 100_000_000  # the format's own limit


class TensorInfo(NamedTuple):
    """Where one tensor is: dtype as the file spells it, shape, bytes [start, start + nbytes) of `file`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    nbytes: int


# What the kernel is told about mapped weights: nothing, that any page may be next, or that and to use large pages.
Advice = Literal["plain", "random", "huge"]
_MADVICE: dict[Advice, list[str]] = {
    "plain": [],
    "random": ["MADV_RANDOM"],
    "huge": ["MADV_RANDOM", "MADV_HUGEPAGE"],
}

Allocate = Callable[[int], Tensor]  # bytes -> uint8 [bytes]


def fresh_memory(nbytes: int) -> Tensor:
    """Memory from torch's allocator."""
    return torch.empty(nbytes, dtype=torch.uint8)


class SafetensorsFile:
    """An open safetensors file. Holds one file descriptor, and one mapping once `view` was called."""

    def __init__(self, path: Path) -> None:
        """Opens `path` and reads its header. Raises CheckpointError when the file is missing or damaged."""
        self.path = path
        self.advice: Advice = "random"  # for the mapping, made when a view is first asked for
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path} can not be opened: {reason(error)}") from error
        weakref.finalize(self, os.close, self._fd).atexit = False
        self.size = os.fstat(self._fd).st_size
        self.infos: dict[str, TensorInfo] = {}
        self.data_start = self._read_header()
        self._map: Tensor | None = None

    def view(self, name: str) -> Tensor:
        """The tensor as a view of the mapped file: nothing is read until its elements are.

        Raises CheckpointError when the file was truncated since it was opened: a later page fault would kill
        the process. A file truncated while a view is in use still does, so weights that are kept are read.
        """
        info = self.infos[name]
        dtype = self._dtype(info)
        if os.fstat(self._fd).st_size < self.size:
            raise CheckpointError(f"{self.path} was truncated after it was opened; {name} can not be read")
        if self._map is None:
            self._map = map_file(self._fd, self.size, self.path, self.advice)
        raw = self._map[info.start : info.start + info.nbytes]
        if raw.data_ptr() % dtype.itemsize:
            raw = raw.clone()  # a tensor after one of odd size: torch needs aligned elements
        return raw.view(dtype).view(info.shape)

    def read_ahead(self, start: int, nbytes: int) -> None:
        """Asks the kernel to read these bytes of the file into its cache now; returns at once, and may be ignored.

        For views about to be used: the mapping has no read-ahead of its own, and page by page the disk gives
        0.03 GB/s where whole experts, eight of them asked for ahead, gave 0.82 in the same minutes.
        """
        os.posix_fadvise(self._fd, start, nbytes, os.POSIX_FADV_WILLNEED)

    def read(self, name: str, allocate: Allocate = fresh_memory, part: int = 0, parts: int = 1) -> Tensor:
        """The tensor copied into memory from `allocate` with preadv (1.5 GB/s from disk; page faults reach 0.25).

        With parts > 1 only element `part` of the first dimension, which has `parts` of them.
        """
        info = self.infos[name]
        dtype, nbytes = self._dtype(info), info.nbytes // parts
        raw = allocate(nbytes)
        self.read_into(raw.numpy().data, info.start + part * nbytes, name)
        return raw.view(dtype).view(info.shape if parts == 1 else info.shape[1:])

    def read_into(self, target: memoryview, start: int, what: str) -> None:
        """Fills `target` with the bytes of the file from offset `start`; `what` names them in an error.

        Raises CheckpointError when the file ends early or the disk reports an error.
        """
        done = 0
        while done < len(target):
            try:
                count = os.preadv(self._fd, [target[done:]], start + done)
            except OSError as error:
                raise CheckpointError(
                    f"{self.path}: {what} can not be read at offset {start + done}: {reason(error)}"
                ) from error
            if count == 0:
                raise CheckpointError(
                    f"{self.path}: the file ends at offset {start + done} inside {what}; it was truncated"
                )
            done += count

    def _dtype(self, info: TensorInfo) -> torch.dtype:
        dtype = DTYPES.get(info.dtype)
        if dtype is None:
            readable = ", ".join(DTYPES)
            raise CheckpointError(f"{self.path}: {info.name} is {info.dtype}; huorn reads {readable}")
        return dtype

    def _damaged(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {what}; the file is damaged or was not fetched completely")

    def _read_header(self) -> int:
        """Parses the header into `infos`; returns the offset where tensor data starts."""
        prefix = bytearray(min(self.size, 64))
        self.read_into(memoryview(prefix), 0, "the header")
        if prefix.startswith(LFS_POINTER):
            raise CheckpointError(
                f"{self.path} is a Git LFS pointer, not the file itself; run `git lfs pull`"
            )
        if prefix.startswith(b"GGUF"):
            raise CheckpointError(f"{self.path} is a GGUF file; huorn opens safetensors checkpoints")
        if self.size < 8:
            raise self._damaged(f"it has {self.size} bytes, fewer than a safetensors header")
        header_bytes = int.from_bytes(prefix[:8], "little")
        if header_bytes > _LARGEST_HEADER:
            raise self._damaged(f"its header claims {header_bytes} bytes, more than the format allows")
        data_start = 8 + header_bytes
        if data_start > self.size:
            raise self._damaged(f"its header claims {header_bytes} bytes but the file has {self.size}")
        raw = bytearray(header_bytes)
        self.read_into(memoryview(raw), 8, "the header")
        try:
            entries = json.loads(raw, object_pairs_hook=_unique_keys)
        except (ValueError, RecursionError) as error:
            raise self._damaged(f"its header is not valid JSON ({error})") from error
        if not isinstance(entries, dict):
            raise self._damaged("its header is not a JSON object")
        for name, entry in entries.items():
            if name != "__metadata__":
                self.infos[name] = self._tensor_info(name, entry, data_start)
        self._check_layout(data_start)
        return data_start

    def _tensor_info(self, name: str, entry: Any, data_start: int) -> TensorInfo:
        try:
            dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
            bits = _ITEM_BITS[dtype]
            numbers = (begin, end, *shape)
        except (KeyError, TypeError, ValueError) as error:
            raise self._damaged(f"the entry of {name} lacks a known dtype, a shape or two offsets") from error
        if any(type(n) is not int or n < 0 for n in numbers):
            raise self._damaged(f"the header entry of {name} has a shape or offset that is no natural number")
        if (end - begin) * 8 != prod(shape) * bits:
            raise self._damaged(f"{name} is {dtype} {list(shape)} but has {end - begin} bytes")
        return TensorInfo(name, dtype, tuple(shape), self.path, data_start + begin, end - begin)

    def _check_layout(self, data_start: int) -> None:
        """Tensor data covers the rest of the file exactly: no gap, no overlap (the format's own rule)."""
        position, previous = data_start, "the header"
        for info in sorted(self.infos.values(), key=lambda info: (info.start, info.nbytes)):
            if info.start < position:
                raise self._damaged(f"{info.name} overlaps {previous} at offset {info.start}")
            if info.start > position:
                gap = info.start - position
                raise self._damaged(f"{gap} bytes between {previous} and {info.name} belong to no tensor")
            position, previous = info.start + info.nbytes, info.name
            if position > self.size:
                raise self._damaged(
                    f"{info.name} ends at offset {position} but the file has {self.size} bytes"
                )
        if position != self.size:
            raise self._damaged(f"{self.size - position} bytes after {previous} belong to no tensor")


def map_file(fd: int, size: int, path: Path, advice: Advice = "random") -> Tensor:
    """The whole file as uint8 [size], mapped privately, by default without read-ahead.

    Through ctypes because mmap.mmap keeps a second descriptor per file, and because a private mapping without
    MAP_NORESERVE is refused when one file is larger than RAM. MADV_RANDOM: read-ahead on a file far larger
    than RAM blocks the machine (llama.cpp 29250).
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    map_noreserve = 0x4000  # Linux; Python's mmap module has no name for it
    address = libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | map_noreserve, fd, 0)
    if address in (None, ctypes.c_void_p(-1).value):
        raise CheckpointError(f"{path} can not be mapped: {os.strerror(ctypes.get_errno())}")
    for name in _MADVICE[advice]:
        if hasattr(mmap, name):
            libc.madvise(address, size, getattr(mmap, name))
    buffer = (ctypes.c_ubyte * size).from_address(address)
    weakref.finalize(buffer, libc.munmap, address, size).atexit = False  # views may outlive the interpreter
    return torch.frombuffer(buffer, dtype=torch.uint8)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) != len(pairs):
        count = Counter(name for name, _ in pairs)
        twice = next(name for name, _ in pairs if count[name] > 1)
        raise ValueError(f"{twice!r} appears twice")
    return entries
