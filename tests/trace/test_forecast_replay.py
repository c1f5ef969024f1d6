"""Replay with forecasts: against a plain simulation, and what perfect, inverted and absent forecasts must do."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from huorn.errors import UsageError
from huorn.experts.foresight import AFTER, BEFORE, FREQUENCY, Forecast
from huorn.experts.policy import HALF_LIFE
from huorn.trace.forecast_replay import ForecastUse, replay_forecast
from huorn.trace.replay import replay_belady, replay_policy
from huorn.trace.route_csv import LayerCall, RouteTrace

LAYERS, EXPERTS, TOP_K = 3, 10, 2


def made(steps: int, seed: int) -> RouteTrace:
    """Every step likes some experts of the step before."""
    rng = np.random.default_rng(seed)
    taste = rng.random((LAYERS, EXPERTS))
    calls = []
    for step in range(steps):
        taste = 0.7 * taste + rng.random((LAYERS, EXPERTS))
        calls += [
            LayerCall(layer, np.argsort(-taste[layer])[None, :TOP_K].astype(np.int32), True, 0, step)
            for layer in range(LAYERS)
        ]
    return RouteTrace("made", LAYERS, EXPERTS, TOP_K, (1,) * LAYERS, tuple(calls))


def perfect(trace: RouteTrace, starts: Sequence[int] = (0,)) -> list[Forecast | None]:
    """1 for what is used within 1, 4, 16 steps, 0 for the rest."""
    steps = len(trace.calls) // LAYERS
    used = np.zeros((steps, LAYERS, EXPERTS), dtype=bool)
    for number, call in enumerate(trace.calls):
        used[number // LAYERS, call.layer, call.ids] = True
    found: list[Forecast | None] = []
    for step in range(steps):
        said = np.stack([used[step : step + ahead].any(0) for ahead in (1, 4, 16)], 1).astype(np.float32)
        found.append(None if step in starts else said)
    return found


def simulated(
    trace: RouteTrace, forecasts: list[Forecast | None], room: int, how: ForecastUse
) -> tuple[int, int]:
    """(misses, loads), with dictionaries and no class of huorn; retention only."""
    count = np.zeros((LAYERS, EXPERTS))
    share = 1 - 2 ** (-1 / HALF_LIFE)
    resident: set[tuple[int, int]] = set()
    misses = loads = 0
    for step in range(len(trace.calls) // LAYERS):
        said = forecasts[step]
        if said is None:
            worth = count * share * sum(BEFORE)
        else:
            worth = sum(b * said[:, g] for g, b in enumerate(BEFORE)) + FREQUENCY * count

        def after(layer: int, said: Forecast | None, before: np.ndarray) -> np.ndarray:
            if said is None:
                return before[layer] * share * sum(AFTER) + FREQUENCY * count[layer]
            return sum(a * said[layer, g] for g, a in enumerate(AFTER)) + FREQUENCY * count[layer]

        before = count.copy()
        for layer in range(LAYERS):

            def least(barred: set[tuple[int, int]], worth: np.ndarray = worth) -> tuple[int, int]:
                return min(resident - barred, key=lambda one: (worth[one], one))

            if said is not None:
                left = how.prefetch
                for expert in sorted(range(EXPERTS), key=lambda e: (-said[layer, 0, e], e)):
                    if left == 0 or said[layer, 0, expert] <= how.threshold:
                        break
                    if (layer, expert) in resident:
                        continue
                    if len(resident) >= room:
                        leaving = least(set())
                        if worth[leaving] >= worth[layer, expert]:
                            break
                        resident.remove(leaving)
                    resident.add((layer, expert))
                    loads, left = loads + 1, left - 1
            mine = [(layer, int(e)) for e in trace.calls[step * LAYERS + layer].ids[0]]
            missing = [key for key in mine if key not in resident]
            misses += len(missing)
            count[layer] *= 2 ** (-1 / HALF_LIFE)
            for key in mine:
                count[key] += 1
            worth[layer] = after(layer, said, before)
            for key in missing:
                if len(resident) >= room:
                    resident.remove(least(set(mine)))
                resident.add(key)
                loads += 1
    return misses, loads


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_counts_are_those_of_a_plain_simulation(data: st.DataObject) -> None:
    trace = made(data.draw(st.integers(1, 30)), data.draw(st.integers(0, 999)))
    rng = np.random.default_rng(data.draw(st.integers(0, 999)))
    starts = {0, *data.draw(st.lists(st.integers(0, 29), max_size=3))}
    # Distinct values: which of two alike goes is not part of the contract.
    forecasts = [
        None
        if step in starts
        else rng.permutation(LAYERS * 3 * EXPERTS).reshape(LAYERS, 3, EXPERTS).astype(np.float32) / 90
        for step in range(30)
    ]
    how = ForecastUse(True, data.draw(st.integers(0, 4)), data.draw(st.sampled_from([0.0, 0.3, 0.9])))
    room = data.draw(st.integers(TOP_K, LAYERS * EXPERTS))
    found = replay_forecast(trace, forecasts, room, how)
    assert (found.misses, found.loads) == simulated(trace, forecasts, room, how)
    assert found.all.lookups == len(trace.calls) * TOP_K


def test_perfect_forecasts_leave_only_what_no_forecast_covers() -> None:
    trace = made(200, 1)
    found = replay_forecast(trace, perfect(trace), 12, ForecastUse(True, TOP_K, 0.5))
    assert found.misses == LAYERS * TOP_K  # the first step
    assert found.loads >= replay_belady(trace, 12).misses


def test_retention_lies_between_counting_and_the_optimum() -> None:
    trace = made(400, 2)
    for room in (8, 12, 16):
        kept = replay_forecast(trace, perfect(trace), room, ForecastUse(True, 0))
        assert replay_belady(trace, room).misses <= kept.misses < replay_policy(trace, "lfu", room).misses
        assert kept.prefetched == 0


def test_prefetch_alone_with_wrong_forecasts_costs_loads() -> None:
    trace = made(200, 3)
    wrong = [None if one is None else 1 - one for one in perfect(trace)]
    right, bad, none = (
        replay_forecast(trace, said, 12, ForecastUse(False, 2, 0.5))
        for said in (perfect(trace), wrong, [None] * 200)
    )
    assert right.misses < none.misses <= bad.misses
    assert bad.loads > none.loads
    assert none.misses == replay_policy(trace, "lfu", 12).misses


def test_layers_without_a_head_go_by_how_often() -> None:
    trace = made(150, 4)
    said = perfect(trace)
    for one in said:
        if one is not None:
            one[1] = np.nan
    found = replay_forecast(trace, said, 12, ForecastUse())
    assert 0 < found.misses < replay_policy(trace, "lfu", 12).misses


def test_what_can_not_be_replayed_is_said() -> None:
    trace = made(3, 5)
    with pytest.raises(UsageError, match="a cache of 1 experts has no room for the 2"):
        replay_forecast(trace, [None] * 3, 1, ForecastUse())
    uneven = RouteTrace(trace.model, LAYERS, EXPERTS, TOP_K, (1, 2, 1), trace.calls)
    with pytest.raises(UsageError, match="one size"):
        replay_forecast(uneven, [None] * 3, 9, ForecastUse())
