"""Copies of experts from files into slots: started, taken back, collected, and looked at when they first land."""

from __future__ import annotations

import errno
import time
from collections.abc import Container
from dataclasses import dataclass

import numpy as np

from huorn import _native
from huorn.errors import CheckpointError
from huorn.experts.policy import Policy
from huorn.experts.reader import ReaderLike, read_error
from huorn.experts.slots import Slots
from huorn.experts.store import ExpertStore
from huorn.kernels.operand import F8


@dataclass
class CacheCounts:
    """What happened so far. A lookup is one distinct expert of one layer call."""

    hits: int = 0
    loading_hits: int = 0  # found while a copy that nobody waited for was under way
    misses: int = 0
    copies: int = 0  # that landed
    bytes_copied: int = 0  # of experts, without slack
    wait_s: float = 0.0  # spent waiting for copies with nothing else to do

    @property
    def lookups(self) -> int:
        """hits + loading_hits + misses."""
        return self.hits + self.loading_hits + self.misses


class Copies:
    """What is under way between a store and slots. The policy counts an expert's slot from the start of its copy on."""

    def __init__(
        self, store: ExpertStore, slots: Slots, policy: Policy, reader: ReaderLike, counts: CacheCounts
    ) -> None:
        """Opens the files for the reader. OSError."""
        self._store, self._slots, self._policy, self._reader, self._counts = (
            store,
            slots,
            policy,
            reader,
            counts,
        )
        self._files = [reader.add_file(str(path)) for path in store.files]
        self._looked_at = np.zeros(len(store.runs), dtype=bool)
        self.loading: set[int] = set()  # keys under way: nobody can have their slots
        self.ahead: dict[int, None] = {}  # those of them that nobody waits for, in the order of their start

    @property
    def direct(self) -> bool:
        """Whether all files are read past the page cache."""
        return all(self._reader.direct(file) for file in self._files)

    def start(self, key: int, demand: bool) -> None:
        """Into a free slot; one must be."""
        start = self._slots.load(key)
        self._policy.admit(key)
        self.loading.add(key)
        runs = [
            (self._files[run.file], run.offset, run.nbytes, start + run.place)
            for run in self._store.runs[key]
        ]
        self._reader.submit(key, runs, demand)
        if not demand:
            self.ahead[key] = None

    def promote(self, key: int) -> None:
        """Somebody waits for it now."""
        self._reader.promote(key)
        self.ahead.pop(key, None)

    def take_back(self, key: int) -> bool:
        """Whether nothing of a copy had started, so that its slot is free. Else the rest is dropped: its slot comes free when the
        reader says so."""
        if not self._reader.cancel(key):
            return False
        self.leave(key)
        return True

    def leave(self, key: int) -> None:
        """The slot of an expert, to which no copy writes any more, is free."""
        self._policy.drop(key)
        self.loading.discard(key)
        self.ahead.pop(key, None)
        self._slots.clear(key)

    def collect(self, wait: bool, needed: Container[int] = ()) -> list[int]:
        """Keys whose copies have landed; with `wait` sleeps until at least one has.

        CheckpointError when a copy that is needed failed, after all that came with it were dealt with. One that nobody waits for
        is forgotten: should it be needed, it fails then.
        """
        start = time.perf_counter()
        done = self._reader.wait(0.0)
        while wait and not done:
            if not self._reader.in_flight:
                self._forget_lost()
                return []
            done = self._reader.wait(1.0)
        if wait:
            self._counts.wait_s += time.perf_counter() - start
        landed, failure = [], None
        for key, error, file, offset in done:
            if error == errno.ECANCELED:
                # Dropped in mid-copy; who came to need it meanwhile finds it EMPTY and asks again.
                self.leave(key)
                continue
            if error:
                found: CheckpointError | None = read_error(
                    self._store.files[file], self._store.name(key), error, offset
                )
            else:
                found = self._damage(key)
            if found is None:
                self.loading.discard(key)
                self.ahead.pop(key, None)
                self._slots.ready(key)
                self._counts.copies += 1
                self._counts.bytes_copied += sum(self._store.part_bytes)
                landed.append(key)
                continue
            self.leave(key)
            if key in needed:
                failure = found
        if failure is not None:
            raise failure
        return landed

    def _forget_lost(self) -> None:
        """Empties slots whose copy has ended without this thread having heard: Ctrl-C can come between the reader's answer and
        its first line here."""
        for key in self._slots.loading():
            self.leave(key)

    def _damage(self, key: int) -> CheckpointError | None:
        """An error when an expert that lands for the first time holds a NaN code. Later landings are the same bytes: the reader
        says when a file has changed."""
        if self._store.format != F8 or self._looked_at[key]:
            return None
        start = self._slots.address(key)
        for place, nbytes, part in zip(
            self._store.parts[key].tolist(), self._store.part_bytes, range(3), strict=True
        ):
            if _native.has_nan_code(start + place, nbytes):
                config = self._store.checkpoint.config
                stored = self._store.checkpoint.expert_parts(*divmod(key, config.num_experts))[part]
                return CheckpointError(
                    f"{stored.file}: {stored.name} holds the NaN code of FP8 (0x7F or 0xFF); the file is damaged"
                )
        self._looked_at[key] = True
        return None
