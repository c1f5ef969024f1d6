"""What the page cache holds of files."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np


def drop_pages(paths: Iterable[Path]) -> None:
    """Takes files out of the page cache, as far as nobody maps them."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def cached_bytes(paths: Iterable[Path]) -> int:
    """Bytes of files that are in the page cache (mincore(2)); 0 where the system does not tell."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mincore"):
        return 0
    total = 0
    for path in paths:
        size = path.stat().st_size
        if not size:
            continue
        with path.open("rb") as file, mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ) as memory:
            words = np.frombuffer(memory, np.uint8)
            pages = np.zeros(-(-size // mmap.PAGESIZE), dtype=np.uint8)
            start = ctypes.c_void_p(words.ctypes.data)
            if libc.mincore(start, ctypes.c_size_t(size), ctypes.c_void_p(pages.ctypes.data)) == 0:
                total += int((pages & 1).sum()) * mmap.PAGESIZE
            del words  # the mapping closes only when no array refers to it
    return total
