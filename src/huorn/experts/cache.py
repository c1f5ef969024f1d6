"""The fast tier at work: makes the experts of a layer call ready, those in slots first and the others as their copies land."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from huorn.experts.copies import CacheCounts, Copies
from huorn.experts.foresight import Forecast, ForecastPolicy
from huorn.experts.ghost import GhostCache
from huorn.experts.policy import Policy
from huorn.experts.prefetch import Brought, PrefetchRule
from huorn.experts.reader import ReaderLike
from huorn.experts.slots import Slots, SlotState
from huorn.experts.store import ExpertStore

# Copies of one layer call under way at once. One of 3 MB keeps the disk busy for 2 ms; more than these would only take slots from
# experts that are still to be used.
AHEAD = 8
# From this many tokens on a chunk uses nearly every expert (1 - (1 - 8/256)^64 = 87 %), so that what the next layer lacks is
# copied while this one computes, and at most this many of them: 96 MB, what the disk gives while attention runs.
STREAM_TOKENS = 64
STREAM_AHEAD = 32
# The share of experts that are used of those that the next layer's router names when it reads this layer's input: 0.81 in
# seedling (docs/predictor.md).
LOOKAHEAD_LIKELY = 0.8


@dataclass(eq=False)
class ExpertCache:
    """An ExpertTable (huorn.model.cpu_experts) over slots. One thread uses it."""

    store: ExpertStore
    slots: Slots
    policy: Policy
    reader: ReaderLike
    quick: Literal[True] = True
    resident: Literal[False] = False
    looks_ahead: bool = False  # copies what the next layer's router makes of this layer's input
    prefetch: PrefetchRule | None = None  # copies what a forecast says
    overlap: bool = True  # False: one copy at a time, and nothing is computed meanwhile; to compare with
    counts: CacheCounts = field(default_factory=CacheCounts)
    brought: Brought = field(default_factory=Brought)

    def __post_init__(self) -> None:
        """Opens the files for the reader. OSError."""
        self._copies = Copies(self.store, self.slots, self.policy, self.reader, self.counts)
        self._experts = self.store.checkpoint.config.num_experts
        self._layers = self.store.checkpoint.config.num_hidden_layers
        # Keys of the layer call at hand that are not computed yet: they keep their slots. Who else does while others can go.
        self._needed: set[int] = set()
        self._spared: tuple[Container[int], ...] = ()
        self._ghost: GhostCache | None = None
        self._likely: NDArray[np.float32] | None = None  # of use by the token at hand, by layer and expert

    @property
    def direct(self) -> bool:
        """Whether all files are read past the page cache."""
        return self._copies.direct

    @property
    def format(self) -> int:
        """Of every expert."""
        return self.store.format

    def addresses(self, layer: int) -> Tensor:
        """i64 [E, 6]: zeros where an expert is not ready."""
        return self.slots.table[layer]

    def used(self, layer: int, ids: NDArray[np.int32]) -> None:
        """A layer call that needed no copy routed ids i32 [T, K]."""
        experts = set(ids.ravel().tolist())
        self.counts.hits += len(experts)
        self.policy.use(layer, ids)
        if self._ghost is not None:
            self._ghost.call(layer, ids)
        if self.brought:
            self._pass(layer, {layer * self._experts + expert for expert in experts}, set())

    def foresee(self, forecast: Forecast | None, most: int = 0) -> None:
        """Between two tokens: what the next one will use, or None. Starts at most `most` copies, as `prefetch` chooses, into
        slots whose experts are less likely to be used."""
        self.settle()
        self._take_back(self.brought.forget())
        if isinstance(self.policy, ForecastPolicy):
            self.policy.foresee(forecast)
        self._likely = None if forecast is None else forecast[:, 0]
        if self._likely is None or self.prefetch is None or not most:
            return
        wanted = self.prefetch.wanted(self._likely, self.slots.ready_mask, min(most, self.slots.count // 4))
        start = time.perf_counter()
        for key in wanted:
            if self.slots.state(key) is SlotState.EMPTY:
                self._bring(key, float(self._likely.flat[key]), self.brought)
        self.brought.counts.begin_s += time.perf_counter() - start

    def start_ghost(self) -> None:
        """Counts from now on what the best policy without forecasts would miss."""
        shape = self._layers, self._experts
        resident = np.flatnonzero(self.slots.ready_mask).tolist()
        worth = self.policy.frequency if isinstance(self.policy, ForecastPolicy) else self.policy.scores()
        self._ghost = GhostCache(shape, self.slots.count, resident, worth)

    def end_ghost(self) -> int:
        """What it has missed; 0 where nothing was counted."""
        ghost, self._ghost = self._ghost, None
        return 0 if ghost is None else ghost.misses

    def _bring(self, key: int, likely: float, protected: Container[int], running: int = -1) -> bool:
        """Whether the copy of an expert that will be used with this probability could begin ahead of need; layers up to `running`
        have routed the token at hand."""
        layer = key // self._experts
        if not self.slots.free:
            victim = self.policy.victim(layer, _Either(protected, self._copies.loading))
            if victim is None or self._is_likelier(victim, key, likely, running):
                return False
            self._copies.leave(victim)
        self._copies.start(key, demand=False)
        self.brought.add(layer, key)
        return True

    def _is_likelier(self, victim: int, key: int, likely: float, running: int) -> bool:
        """Whether a resident must not make room for another expert."""
        if isinstance(self.policy, ForecastPolicy):
            return self.policy.worth(victim) >= max(likely, self.policy.worth(key))
        if self._likely is None or victim // self._experts <= running:
            return False
        return bool(self._likely.flat[victim] >= likely)  # NaN is not

    def _pass(self, layer: int, used: set[int], late: set[int]) -> None:
        """`layer` uses these experts: what was brought for it besides is taken back, as far as it has not begun."""
        self._take_back(self.brought.passed(layer, used, late))

    def _take_back(self, keys: Iterable[int]) -> None:
        for key in keys:
            if key in self._copies.loading:
                self._copies.take_back(key)

    def _look_ahead(self, layer: int, said: NDArray[np.int32]) -> None:
        """Starts copies of what `layer`, the next one, is about to choose."""
        first = layer * self._experts
        keys = dict.fromkeys(first + expert for expert in said.ravel().tolist())
        keep = _Either(self._needed, _Either(self.brought, keys))
        for key in keys:
            if self.slots.state(key) is SlotState.EMPTY and not self._bring(
                key, LOOKAHEAD_LIKELY, keep, layer - 1
            ):
                return

    def waves(
        self, layer: int, ids: NDArray[np.int32], said: NDArray[np.int32] | None = None
    ) -> Iterator[list[int]]:
        """Expert ids that are ready, group after group until all of ids i32 [T, K] were given: first those in slots (may be
        none), then others as they land. Each group stays ready until the next is asked for.

        CheckpointError when one can not be copied or is damaged; slots and counts are as if it had not been asked for.
        """
        self.settle()
        self.policy.use(layer, ids)
        if self._ghost is not None:
            self._ghost.call(layer, ids)
        first = layer * self._experts
        counts = Counter(ids.ravel().tolist())
        keys = {first + expert: self.slots.state(first + expert) for expert in counts}
        resident = [key for key, state in keys.items() if state is SlotState.READY]
        loading = [key for key, state in keys.items() if state is SlotState.LOADING]
        empty = [key for key, state in keys.items() if state is SlotState.EMPTY]
        # The busiest last: they stay.
        missing = deque(sorted(empty, key=lambda key: (counts[key - first], -key)))
        self.counts.hits += len(resident)
        self.counts.loading_hits += len(loading)
        self.counts.misses += len(missing)
        for key in loading:
            self._copies.promote(key)
        self._needed, touched = set(keys), set(keys)
        self._spared = _Either(touched, self.brought), touched, self._needed
        if self.brought:
            self._pass(layer, self._needed, set(loading))
        streaming = len(ids) >= STREAM_TOKENS and layer + 1 < self._layers
        waiting = set(loading)
        try:
            self._demand(layer, missing, waiting)
            if said is not None:
                self._look_ahead(layer + 1, said)
            while (
                not self.overlap
                and waiting
                and (landed := waiting.intersection(self._copies.collect(True, self._needed)))
            ):
                resident += landed
                waiting -= landed
                self._demand(layer, missing, waiting)
            yield [key - first for key in resident]
            self._needed.difference_update(resident)
            while waiting or missing:
                self._demand(layer, missing, waiting)
                if streaming and not missing:
                    self._stream(layer + 1)
                landed = waiting.intersection(self._copies.collect(True, self._needed))
                waiting -= landed
                lost = {key for key in waiting if self.slots.state(key) is SlotState.EMPTY}
                missing.extend(lost)
                waiting -= lost
                yield [key - first for key in landed]
                self._needed -= landed
            if streaming:
                self._stream(layer + 1)
        finally:
            self._needed, self._spared = set(), ()

    def warm_up(self, scores: NDArray[np.float64]) -> None:
        """Starts to fill the slots with the experts of the largest scores > 0, float64 [layers, experts], of an earlier
        session. They land while the first prompt is read; what it misses comes before them."""
        self.policy.start_from(scores)
        best = np.argsort(-scores.ravel(), kind="stable")[: self.slots.free].tolist()
        for key in best:
            if scores.flat[key] > 0 and self.slots.state(key) is SlotState.EMPTY:
                self._copies.start(key, demand=False)

    def settle(self) -> None:
        """Takes note of copies that have landed since the last call. CheckpointError never: nobody waits for them."""
        self._copies.collect(False)

    def _demand(self, layer: int, missing: deque[int], waiting: set[int]) -> None:
        """Starts copies of what is missing, in order, as far as AHEAD and slots allow."""
        most = AHEAD if self.overlap else 1
        while missing and len(waiting) < most and self._make_room(layer, *self._spared):
            key = missing.popleft()
            self._copies.start(key, demand=True)
            waiting.add(key)

    def _stream(self, coming: int) -> None:
        """Starts copies of what the next layer lacks. Nothing that the layer at hand still needs, nor what the next one has,
        makes room for it."""
        keep = _Kept(self._needed, coming, self._experts)
        most = min(STREAM_AHEAD, self.slots.count // 4)
        for key in range(coming * self._experts, (coming + 1) * self._experts):
            if len(self._copies.ahead) >= most:
                return
            if self.slots.state(key) is SlotState.EMPTY:
                if not self._make_room(coming - 1, keep):
                    return
                self._copies.start(key, demand=False)

    def _make_room(self, layer: int, *protected: Container[int]) -> bool:
        """Whether a slot is free, if need be after the policy's victim has left one, or a copy that nobody waits for and that has
        not started. Where all others are in the first of `protected`, what the next one does not have may go."""
        if self.slots.free:
            return True
        for some in protected:
            victim = self.policy.victim(layer, _Either(some, self._copies.loading))
            if victim is not None:
                self._copies.leave(victim)
                return True
            if self._cancel_one():
                return True
        return False

    def _cancel_one(self) -> bool:
        """Whether the last prefetch that had not started yet was taken back. Those that had are dropped too: their slots come
        free when the reader says so."""
        for key in reversed(list(self._copies.ahead)):
            if self._copies.take_back(key):
                self.brought.discard(key)
                return True
        return False


@dataclass(frozen=True)
class _Either:
    one: Container[int]
    other: Container[int]

    def __contains__(self, key: object) -> bool:
        return key in self.one or key in self.other


@dataclass(frozen=True)
class _Kept:
    """What must not make room for experts of layer `coming`."""

    needed: set[int]
    coming: int
    experts: int

    def __contains__(self, key: object) -> bool:
        return key in self.needed or (isinstance(key, int) and key // self.experts == self.coming)
