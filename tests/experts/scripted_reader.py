"""A reader without threads that lands, delays and fails copies on cue, for tests of what is built on `huorn._native.Reader`.

Copies land only inside `wait`. Until then their memory, with the slack that a real reader may overwrite, is 0xFF: the NaN code of
E4M3 and BF16, so that a use before landing shows. A failed copy leaves it so.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

from huorn.experts.reader import TRUNCATED, Completion, Segment

BLOCK = 4096
# Which of the keys that could land do so in this `wait`, and in which order. They come in the order of a real queue: demand
# before prefetch, first come first served.
Order = Callable[[Sequence[int]], Sequence[int]]


def one_by_one(keys: Sequence[int]) -> Sequence[int]:
    """One copy per `wait`, as one lane would."""
    return keys[:1]


def all_at_once(keys: Sequence[int]) -> Sequence[int]:
    return keys


def all_reversed(keys: Sequence[int]) -> Sequence[int]:
    return keys[::-1]


def shuffled(seed: int) -> Order:
    """Any number of them in any order, at least one."""
    random = Random(seed)
    return lambda keys: random.sample(keys, random.randint(1, len(keys)))


@dataclass
class _Copy:
    segments: Sequence[Segment]
    demand: bool
    cancelled: bool = False


@dataclass
class ScriptedReader:
    """`ReaderLike`; a test sets the fields below, at any time, to say what happens.

    order:   what lands in a `wait`
    delays:  key -> calls of `wait` in which it does not land yet (counted down)
    errors:  key -> (error, offset) it ends with: an errno, TRUNCATED or CHANGED
    started: keys of which a stripe has been read already: `cancel` is False and a completion with ECANCELED comes
    calls:   (name, key) of each submit ("demand" or "prefetch"), promote and cancel, and of each completion ("landed", "failed")
    """

    order: Order = one_by_one
    delays: dict[int, int] = field(default_factory=dict)
    errors: dict[int, tuple[int, int]] = field(default_factory=dict)
    started: set[int] = field(default_factory=set)
    calls: list[tuple[str, int]] = field(default_factory=list)
    engine: str = "scripted"
    bytes_read: int = 0

    def __post_init__(self) -> None:
        self._files: list[str] = []
        self._copies: dict[int, _Copy] = {}  # under way, in the order of submission or promotion

    @property
    def in_flight(self) -> int:
        return len(self._copies)

    def add_file(self, path: str) -> int:
        with open(path, "rb"):  # the OSError a missing file or folder gives
            self._files.append(path)
        return len(self._files) - 1

    def direct(self, file: int) -> bool:
        return True

    def submit(self, key: int, segments: Sequence[Segment], demand: bool) -> None:
        if key in self._copies:
            raise ValueError(f"the copy {key} is already under way")
        if not segments:
            raise ValueError("a copy needs at least one segment")
        for file, offset, nbytes, address in segments:
            if nbytes < 1 or offset % BLOCK != address % BLOCK or file >= len(self._files):
                raise ValueError(f"no such segment: {(file, offset, nbytes, address)}")
        for _, _, nbytes, address in segments:
            begin, end = address // BLOCK * BLOCK, -(-(address + nbytes) // BLOCK) * BLOCK
            ctypes.memset(begin, 0xFF, end - begin)
        self._copies[key] = _Copy(list(segments), demand)
        self.calls.append(("demand" if demand else "prefetch", key))

    def promote(self, key: int) -> bool:
        self.calls.append(("promote", key))
        if key not in self._copies:
            return False
        if not self._copies[key].demand:
            self._copies[key] = copy = self._copies.pop(key)  # to the end
            copy.demand = True
        return True

    def cancel(self, key: int) -> bool:
        self.calls.append(("cancel", key))
        if key not in self._copies:
            return False
        if key in self.started:
            self._copies[key].cancelled = True
            return False
        del self._copies[key]
        return True

    def wait(self, timeout_s: float) -> list[Completion]:
        """What `order` picks of the copies whose delay is over; does not sleep."""
        able = [key for key in self._copies if self.delays.get(key, 0) == 0]
        able.sort(key=lambda key: not self._copies[key].demand)
        for key in self._copies:
            if self.delays.get(key, 0) > 0:
                self.delays[key] -= 1
        return [self._complete(key) for key in self.order(able)] if able else []

    def _complete(self, key: int) -> Completion:
        copy = self._copies.pop(key)
        file, offset, _, _ = copy.segments[0]
        error = 0
        if copy.cancelled:
            error = errno.ECANCELED
        elif key in self.errors:
            error, offset = self.errors[key]
        else:
            error, file, offset = self._read(copy)
        self.calls.append(("failed" if error else "landed", key))
        return key, error, file, offset

    def _read(self, copy: _Copy) -> tuple[int, int, int]:
        """All segments or none of them into memory; (error, file, offset)."""
        found = []
        for file, offset, nbytes, _ in copy.segments:
            with open(self._files[file], "rb") as source:
                data = os.pread(source.fileno(), nbytes, offset)
            self.bytes_read += len(data)
            if len(data) < nbytes:
                return TRUNCATED, file, offset + len(data)
            found.append(data)
        for (_, _, nbytes, address), data in zip(copy.segments, found, strict=True):
            ctypes.memmove(address, data, nbytes)
        return 0, copy.segments[0][0], copy.segments[0][1]
