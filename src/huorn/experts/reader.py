"""What reads experts from disk, as its callers see it: the native reader, or one that a test scripts.

A copy is under way from `submit` until `wait` returned its completion; `cancel` that returns True ends it too.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from huorn.errors import CheckpointError

# benchmarks/direct_read.py on a virtual disk, both cores busy with other work: 8 threads with stripes of 512 KiB gave 1.9 to
# 2.1 GB/s at 0.04 to 0.05 CPU seconds per GB, and a lone copy of 3 MiB in 1.5 to 1.6 ms; 4 threads 1.7 to 2.0 GB/s and 1.7 to
# 1.8 ms, with 256 KiB 1.5 to 1.6 GB/s and twice the CPU time; io_uring with 2 to 8 lanes 1.1 to 1.7 GB/s.
LANES = 8
AHEAD_LANES = 4  # of them for prefetches at most
STRIPE_BYTES = 512 << 10
URING = False

# Errors of a completion that are no errno.
TRUNCATED = -1  # the file ended before the bytes needed
CHANGED = -2  # the file has another size or modification time than when it was added

Segment = tuple[int, int, int, int]  # file, offset, bytes, address
Completion = tuple[int, int, int, int]  # key, error (0: all bytes landed), file, offset


class ReaderLike(Protocol):
    """The interface of `huorn._native.Reader`, called from one thread.

    A copy is cut into at most 16 stripes, one more for each segment smaller than a stripe. Stripes of demand copies
    are read before any of a prefetch, first come first served; what is in flight at the device is let go on. Prefetches are
    given a part of the lanes only.
    """

    def add_file(self, path: str) -> int:
        """Opens a regular file and returns its number. OSError with its name."""

    def direct(self, file: int) -> bool:
        """Whether the file is read past the page cache."""

    @property
    def engine(self) -> str:
        """What it reads with: "io_uring" or "threads"."""

    def submit(self, key: int, segments: Sequence[Segment], demand: bool) -> None:
        """Starts one copy: for each segment, byte `offset` of the file goes to `address`.

        Memory from round_down(address, 4096) to round_up(address + bytes, 4096) must be free to write until the copy has
        completed. ValueError when the key is under way, when address and offset differ modulo 4096, when two segments
        share a block of memory without being neighbours in the file, or for no bytes.
        """

    def promote(self, key: int) -> bool:
        """A prefetch that turned into a miss goes to the end of the demand queue. False when the key is not under way."""

    def cancel(self, key: int) -> bool:
        """True: nothing of the copy had started, it is gone, and no completion comes.

        False: it is finished or unknown, or in flight: then the rest is dropped and a completion with errno ECANCELED comes.
        """

    def wait(self, timeout_s: float) -> list[Completion]:
        """Completions since the last call; sleeps until there is one or the time is over (0: does not sleep).

        `error` is 0, an errno, TRUNCATED or CHANGED; `offset` is where in `file` it happened. The memory of a failed copy
        holds anything.
        """

    @property
    def bytes_read(self) -> int:
        """From all files so far, with the ends of blocks that nobody asked for."""

    @property
    def busy_s(self) -> float:
        """Seconds so far during which something was being read."""

    @property
    def in_flight(self) -> int:
        """Copies under way."""


def read_error(path: Path, what: str, error: int, offset: int) -> CheckpointError:
    """The sentence for a completion with an error: file, tensor (`what`) and offset."""
    if error == TRUNCATED:
        return CheckpointError(
            f"{path}: the file ends at offset {offset} before {what} does; it was truncated"
        )
    if error == CHANGED:
        return CheckpointError(
            f"{path}: the file was changed after it was opened; {what} at offset {offset} can not be trusted"
        )
    return CheckpointError(f"{path}: {what} can not be read at offset {offset}: {os.strerror(error)}")
