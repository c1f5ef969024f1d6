"""Replay with forecasts: what a bank would have had copied ahead, and kept, on recorded routing.

Counted as in replay.py. Before each decode step the forecast made at the end of the step before is known. A prefetch of a layer
has landed when the layer runs, as on a link that is fast enough; it takes no place from an expert that is expected sooner than
what it brings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from huorn.errors import UsageError
from huorn.experts.foresight import Forecast, ForecastPolicy
from huorn.experts.policy import DEFAULT_POLICY, make_policy
from huorn.trace.replay import Count, Replayed
from huorn.trace.route_csv import RouteTrace


@dataclass(frozen=True)
class ForecastUse:
    """What forecasts are used for: `retention` decides who leaves, `prefetch` is the most copies ahead per layer and token, of
    experts whose probability is above `threshold`."""

    retention: bool = True
    prefetch: int = 3
    threshold: float = 0.15


class _Decides(Protocol):
    def use(self, layer: int, ids: np.ndarray) -> None: ...
    def admit(self, key: int) -> None: ...
    def drop(self, key: int) -> None: ...
    def victim(self, layer: int, protected: set[int]) -> int | None: ...


class _Cache:
    """Residents, all of one size."""

    def __init__(self, room: int, policy: _Decides) -> None:
        self.room, self.policy = room, policy
        self.resident: set[int] = set()
        self.loads = 0

    def load(self, key: int) -> None:
        self.policy.admit(key)
        self.resident.add(key)
        self.loads += 1

    def leave(self, key: int) -> None:
        self.policy.drop(key)
        self.resident.remove(key)


def replay_forecast(
    trace: RouteTrace, forecasts: Sequence[Forecast | None], capacity_bytes: int, how: ForecastUse
) -> Replayed:
    """Replays decode steps; forecasts[n] is what is known before the n-th of them, None at the start of a prompt.

    Raises UsageError when experts differ in size, or not even one fits.
    """
    if len(set(trace.expert_bytes)) != 1:
        raise UsageError("forecasts are replayed on models whose experts are all of one size")
    room = capacity_bytes // trace.expert_bytes[0]
    if room < trace.top_k:
        raise UsageError(f"a cache of {room} experts has no room for the {trace.top_k} of one call")
    forecast_policy = ForecastPolicy(trace.layers, trace.experts)
    policy: _Decides = (
        forecast_policy if how.retention else make_policy(DEFAULT_POLICY, trace.layers, trace.experts, room)
    )
    cache, lookups, hits, step = _Cache(room, policy), 0, 0, -1
    forecast: Forecast | None = None
    for number, call in enumerate(trace.calls):
        if number % trace.layers == 0:
            step += 1
            forecast = forecasts[step]
            forecast_policy.foresee(forecast)
        first = call.layer * trace.experts
        if forecast is not None and how.prefetch:
            _prefetch(cache, forecast, call.layer, first, how, forecast_policy if how.retention else None)
        touched = [first + expert for expert in call.ids.ravel().tolist()]
        misses = [key for key in touched if key not in cache.resident]
        lookups, hits = lookups + len(touched), hits + len(touched) - len(misses)
        policy.use(call.layer, call.ids)
        protected = set(touched)
        for key in misses:
            if len(cache.resident) >= room:
                leaving = policy.victim(call.layer, protected)
                assert leaving is not None  # there is room for a call
                cache.leave(leaving)
            cache.load(key)
    return Replayed(
        Count(lookups, hits),
        Count(lookups, hits),
        cache.loads * trace.expert_bytes[0],
        cache.loads - (lookups - hits),
    )


def _prefetch(
    cache: _Cache, forecast: Forecast, layer: int, first: int, how: ForecastUse, ranks: ForecastPolicy | None
) -> None:
    """Copies what this layer is said to need and lacks, the likeliest first, as far as places are worth less."""
    likely = forecast[layer, 0]
    left = how.prefetch
    for expert in np.argsort(-likely, kind="stable").tolist():
        if left == 0 or not likely[expert] > how.threshold:  # NaN is not either
            return
        key = first + expert
        if key in cache.resident:
            continue
        if len(cache.resident) >= cache.room:
            leaving = cache.policy.victim(layer, set())
            if leaving is None:
                return
            if ranks is not None:
                if ranks.worth(leaving) >= ranks.worth(key):
                    return
            else:
                other, its = divmod(leaving, len(likely))
                if other >= layer and forecast[other, 0, its] >= likely[expert]:
                    return
            cache.leave(leaving)
        cache.load(key)
        left -= 1
