"""Rough read speeds of the disk and of RAM for `huorn doctor`: seconds, not a benchmark.

A published number needs the native yardstick of `huorn bench`; these two only say which order of size to expect.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

PROBE_BYTES = 512 << 20
# Two lanes of 1 MiB gave 3.1 GB/s on a virtual disk where one lane gave 1.5 and eight-MiB requests 1.4 to 1.7.
LANES = 2
REQUEST_BYTES = 1 << 20
TIME_LIMIT_S = 3.0
RAM_PROBE_BYTES = 512 << 20  # several times any last-level cache but the largest
RAM_TIME_S = 1.0
RAM_FILE_SYSTEMS = ("tmpfs", "ramfs")


@dataclass(frozen=True)
class ReadSpeed:
    """Bytes a second and what a reader should know about how it was taken (empty when nothing)."""

    bytes_per_s: float
    note: str


def measure_disk_read(place: Path) -> ReadSpeed:
    """Direct read speed (O_DIRECT, two lanes) of the disk that holds `place`; 0 with a note when it could not be taken.

    `place` is a folder or a file. The largest file of at least 512 MiB directly in the folder is read; without
    one a file without a name (O_TMPFILE) is written there first, so nothing is left behind even after kill -9.
    """
    folder = place if place.is_dir() else place.parent
    notes = [f"{kind} lives in RAM"] if (kind := file_system(folder)) in RAM_FILE_SYSTEMS else []
    try:
        existing = largest_file(place)
        if existing is not None:
            with existing.open("rb", buffering=0) as source:
                speed = _read_speed(source.fileno(), PROBE_BYTES, notes)
        else:
            with tempfile.TemporaryFile(dir=folder, buffering=0) as scratch:
                written = _write_probe(scratch.fileno())
                speed = _read_speed(scratch.fileno(), written, notes)
    except OSError as error:
        return ReadSpeed(0.0, f"not measured: {error.strerror}")
    return ReadSpeed(speed, "; ".join(notes))


def measure_ram_read(available_bytes: int, threads: int) -> ReadSpeed | None:
    """Rough read bandwidth of RAM: NumPy sums 512 MiB, one slice per thread, best of some passes within a second.

    The words lie on huge pages where the kernel grants them: with 4 KiB pages filling 1 GiB took 3.7 s on a
    virtual machine, longer than everything else here together. Plain threads, since OpenMP's barriers took twenty
    times as long while another program was busy. None with less than 1 GiB available.
    """
    if available_bytes < 1 << 30:
        return None
    with _private_memory(RAM_PROBE_BYTES) as memory, ThreadPoolExecutor(threads) as pool:
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        slices = np.array_split(np.frombuffer(memory, np.int64), threads)
        # Untouched pages are all the same zero page, which a cache serves.
        list(pool.map(lambda words: words.fill(1), slices))
        passes: list[float] = []
        while len(passes) < 8 and sum(passes) < RAM_TIME_S:
            start = time.perf_counter()
            list(pool.map(np.sum, slices))
            passes.append(time.perf_counter() - start)
        del slices  # the mapping closes only when no array refers to it
    return ReadSpeed(RAM_PROBE_BYTES / min(passes), f"rough: NumPy sum, {threads} threads")


def _private_memory(nbytes: int) -> mmap.mmap:
    """Python's default is shared memory, which gets no huge pages."""
    return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def largest_file(place: Path) -> Path | None:
    """The largest regular file of at least 512 MiB that is `place` or lies directly in it."""
    candidates = [place] if place.is_file() else [p for p in place.iterdir() if p.is_file()]
    sized = [(p.stat().st_size, p) for p in candidates if os.access(p, os.R_OK)]
    size, path = max(sized, default=(0, None))
    return path if size >= PROBE_BYTES else None


def file_system(folder: Path, mounts: Path = Path("/proc/self/mounts")) -> str:
    """Type of the file system that holds `folder` ("ext4", "tmpfs"); empty when the system does not tell."""
    if not mounts.exists():
        return ""
    where = folder.resolve()
    best = ("", "")
    for line in mounts.read_text().splitlines():
        _, point, kind, *_ = line.split(" ")
        point = point.replace("\\040", " ")
        if where.is_relative_to(point) and len(point) >= len(best[0]):
            best = (point, kind)
    return best[1]


def _write_probe(fd: int) -> int:
    """Fill the scratch file for at most half of the time limit; returns the bytes written (whole requests)."""
    block = os.urandom(8 * REQUEST_BYTES)  # zeros would be kept as holes by some file systems
    deadline = time.monotonic() + TIME_LIMIT_S / 2
    written = 0
    while written < PROBE_BYTES and time.monotonic() < deadline:
        written += os.write(fd, block)
    os.fsync(fd)
    return written // (LANES * REQUEST_BYTES) * LANES * REQUEST_BYTES


def _read_speed(fd: int, size: int, notes: list[str]) -> float:
    """Bytes per second over the first `size` bytes of `fd`, 0 when nothing could be read; says in `notes` what was not direct."""
    if not _make_direct(fd):
        notes.append("through the page cache: no O_DIRECT here")
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(fd, 0, size, os.POSIX_FADV_DONTNEED)
    deadline = time.monotonic() + TIME_LIMIT_S

    def lane(index: int) -> int:
        done = 0
        with mmap.mmap(-1, REQUEST_BYTES) as buffer:  # page aligned, as O_DIRECT wants
            for offset in range(index * REQUEST_BYTES, size, LANES * REQUEST_BYTES):
                if time.monotonic() > deadline:
                    break
                done += os.preadv(fd, [buffer], offset)
        return done

    start = time.perf_counter()
    with ThreadPoolExecutor(LANES) as pool:
        done = sum(pool.map(lane, range(LANES)))
    return done / (time.perf_counter() - start)


def _make_direct(fd: int) -> bool:
    """Switch an open file to O_DIRECT; False where the system or the file system has none."""
    if not hasattr(os, "O_DIRECT"):
        return False
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)
    except OSError:
        return False
    return True
