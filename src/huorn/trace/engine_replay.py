"""Replay of recorded routing as the engine's cache would go through it, with forecasts and, on request, with time.

Counted as in replay.py, and decided by the engine's own classes: before a decode step the forecast made at the end of the step
before starts copies (PrefetchRule), in the order of layers, into places of experts that are less likely to be used; a copy in
vain is taken back once its layer has run, if it has not begun; what was brought for a layer keeps its place until then.

With a `Pace` copies take time. The link does one stripe after the other, demand before prefetch; a layer computes while its
misses are copied, and its last expert's share of the compute comes behind the last copy. An expert whose copy is under way when
its layer asks is counted as late. Without one a copy has landed when it begins: what an infinitely fast link would give.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

import numpy as np

from huorn.errors import UsageError
from huorn.experts.foresight import MULTI_HORIZON, Forecast, ForecastPolicy, Weighting
from huorn.experts.policy import DEFAULT_POLICY, Policy, make_policy
from huorn.experts.prefetch import Brought, PrefetchRule
from huorn.trace.replay import Count, Replayed
from huorn.trace.route_csv import RouteTrace

STRIPES = 6  # of an expert of 3 MB (huorn.experts.reader.STRIPE_BYTES): what a demand copy may have to wait for is one of them


@dataclass(frozen=True)
class Pace:
    """Seconds: `layer_s` to compute a layer, `rest_s` for the rest of a token (lm_head, sampling, scoring), `copy_s` per
    expert."""

    layer_s: float
    rest_s: float
    copy_s: float


@dataclass(frozen=True)
class ForecastUse:
    """What forecasts are used for: who leaves, by `weighting` of horizons (None: `policy` decides), and
    what is copied ahead (None: nothing)."""

    weighting: Weighting | None = MULTI_HORIZON
    prefetch: PrefetchRule | None = None
    policy: str = DEFAULT_POLICY  # without weighting


@dataclass
class _Link:
    """Copies under way, in stripes; `now` is the time of the computation."""

    stripe_s: float
    now: float = 0.0
    free_at: float = 0.0  # when the stripe at hand has been read
    demand: dict[int, int] = field(default_factory=dict)  # key -> stripes left, in the order of submission
    ahead: dict[int, int] = field(default_factory=dict)
    landed: dict[int, float] = field(default_factory=dict)

    def advance(self, until: float) -> None:
        """Reads stripes as long as one can begin before `until`."""
        while (queue := self.demand or self.ahead) and self.free_at < until:
            key = next(iter(queue))
            self.free_at += self.stripe_s
            queue[key] -= 1
            if not queue[key]:
                del queue[key]
                self.landed[key] = self.free_at

    def submit(self, key: int, demand: bool) -> None:
        if not self.demand and not self.ahead:
            self.free_at = max(self.free_at, self.now)
        (self.demand if demand else self.ahead)[key] = STRIPES

    def cancel(self, key: int) -> bool:
        """Whether nothing of it had been read."""
        if self.ahead.get(key) == STRIPES:
            del self.ahead[key]
            return True
        return False

    def wait(self, keys: set[int]) -> float:
        """Until all of `keys` have landed; when the last did."""
        for key in keys & self.ahead.keys():
            self.demand[key] = self.ahead.pop(key)
        while keys & self.demand.keys():
            self.advance(self.free_at + self.stripe_s / 2)
        return max((self.landed[key] for key in keys), default=-inf)


def replay_engine(
    trace: RouteTrace, forecasts: Sequence[Forecast | None], capacity_bytes: int, how: ForecastUse, pace: Pace | None = None
) -> Replayed:  # fmt: skip
    """Replays a trace; forecasts[n] is what is known before its n-th step, None at the start of a prompt. Steps are counted over
    prefills and decode steps.

    Raises UsageError when experts differ in size, or not all of a call fit.
    """
    if len(set(trace.expert_bytes)) != 1:
        raise UsageError("forecasts are replayed on models whose experts are all of one size")
    room = capacity_bytes // trace.expert_bytes[0]
    if room < trace.top_k:
        raise UsageError(f"a cache of {room} experts has no room for the {trace.top_k} of one call")
    return _Replay(trace, room, how, pace).run(forecasts)


class _Replay:
    def __init__(self, trace: RouteTrace, room: int, how: ForecastUse, pace: Pace | None) -> None:
        layers, experts = trace.layers, trace.experts
        self._trace, self._room, self._how, self._pace = trace, room, how, pace
        self._forecast_policy = (
            None if how.weighting is None else ForecastPolicy(layers, experts, how.weighting)
        )
        self._policy: Policy = self._forecast_policy or make_policy(how.policy, layers, experts, room)
        self._there = np.zeros((layers, experts), dtype=np.bool_)
        self._loading: set[int] = set()
        self._brought = Brought()
        self._likely: np.ndarray | None = None
        self._link = _Link(0.0 if pace is None else pace.copy_s / STRIPES)
        self._lookups, self._hits, self._late = [0, 0], [0, 0], 0
        self._loads = self._steps = self._used = 0

    def run(self, forecasts: Sequence[Forecast | None]) -> Replayed:
        wait_s = 0.0
        for call in self._trace.calls:
            if call.layer == 0:
                if call.decode and self._pace is not None:
                    self._link.now += self._pace.rest_s
                self._begin(forecasts[self._steps] if forecasts else None)
                self._steps += 1
            wait_s += self._call(call.layer, call.ids, call.decode)
        every, timed = Count(sum(self._lookups), sum(self._hits)), self._pace is not None
        return Replayed(
            every, Count(self._lookups[True], self._hits[True]), self._loads * self._trace.expert_bytes[0],
            self._loads - (every.lookups - every.hits - self._late), self._late,
            self._link.now / self._steps if timed else None, wait_s / self._steps if timed else None,
        )  # fmt: skip

    def _begin(self, forecast: Forecast | None) -> None:
        """What ExpertCache.foresee does."""
        self._settle()
        self._take_back(self._brought.forget())
        if self._forecast_policy is not None:
            self._forecast_policy.foresee(forecast)
        self._likely = None if forecast is None else forecast[:, 0]
        if self._likely is None or self._how.prefetch is None:
            return
        for key in self._how.prefetch.wanted(self._likely, self._there, self._room // 4):
            if key in self._loading:
                continue
            if not self._make_room_for(key, float(self._likely.flat[key])):
                continue
            self._load(key, demand=False)
            self._brought.add(key // self._trace.experts, key)

    def _make_room_for(self, key: int, likely: float) -> bool:
        if self._used < self._room:
            return True
        layer = key // self._trace.experts
        victim = self._policy.victim(layer, self._brought)
        if victim is None or self._is_likelier(victim, key, likely):
            return False
        self._leave(victim)
        return True

    def _is_likelier(self, victim: int, key: int, likely: float) -> bool:
        if self._forecast_policy is not None:
            return self._forecast_policy.worth(victim) >= max(likely, self._forecast_policy.worth(key))
        assert self._likely is not None
        return bool(self._likely.flat[victim] >= likely)  # no layer has run yet

    def _call(self, layer: int, ids: np.ndarray, decode: bool) -> float:
        """One layer call; how long it waited beyond its compute."""
        self._settle()
        self._policy.use(layer, ids)
        first = layer * self._trace.experts
        touched = dict.fromkeys(first + expert for expert in ids.ravel().tolist())
        late = {key for key in touched if key in self._loading}
        misses = [key for key in touched if key not in late and not self._there.flat[key]]
        self._lookups[decode] += len(touched)
        self._hits[decode] += len(touched) - len(misses) - len(late)
        self._late += len(late)
        self._take_back(self._brought.passed(layer, set(touched), late))
        protected = set(touched)
        for key in misses:
            while self._used >= self._room:
                leaving = self._policy.victim(layer, _Both(protected, self._brought))
                if leaving is None:
                    leaving = self._policy.victim(layer, protected)
                if leaving is None and self._loading:
                    self._link.now = max(self._link.now, self._link.wait(set(self._loading)))
                    self._settle()
                    continue
                if leaving is None:
                    protected = set()  # the next wave, as in replay.py
                    continue
                self._leave(leaving)
            self._load(key, demand=True)
            protected.add(key)
        return self._compute(late | set(misses))

    def _compute(self, waited: set[int]) -> float:
        if self._pace is None:
            return 0.0
        link, layer_s = self._link, self._pace.layer_s
        done = link.wait(waited & (self._loading | set(link.demand) | set(link.ahead)))
        end = max(link.now + layer_s, done + layer_s / (self._trace.top_k + 1))
        wait_s, link.now = end - link.now - layer_s, end
        self._settle()
        return wait_s

    def _settle(self) -> None:
        """Takes note of copies that have landed by now."""
        self._link.advance(self._link.now)
        for key in [key for key, at in self._link.landed.items() if at <= self._link.now]:
            del self._link.landed[key]
            if key in self._loading:
                self._loading.remove(key)
                self._there.flat[key] = True
                self._policy.admit(key)

    def _load(self, key: int, demand: bool) -> None:
        self._loads, self._used = self._loads + 1, self._used + 1
        if self._pace is None:
            self._there.flat[key] = True
            self._policy.admit(key)
            return
        self._loading.add(key)
        self._link.submit(key, demand)

    def _leave(self, key: int) -> None:
        self._policy.drop(key)
        self._there.flat[key] = False
        self._used -= 1

    def _take_back(self, keys: set[int]) -> None:
        for key in keys:
            if key in self._loading and self._link.cancel(key):
                self._loading.remove(key)
                self._loads, self._used = self._loads - 1, self._used - 1


@dataclass(frozen=True)
class _Both:
    one: set[int]
    other: Brought

    def __contains__(self, key: object) -> bool:
        return key in self.one or key in self.other
