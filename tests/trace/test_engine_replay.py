"""Replay as the engine goes: against plain simulations and the engine itself, and what perfect and wrong forecasts must do."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from huorn.engine.fast_tier import Residency
from huorn.engine.forecasting import OFF, Forecasting
from huorn.engine.session import Session
from huorn.errors import UsageError
from huorn.experts.foresight import FREQUENCY, MULTI_HORIZON, ONE_TOKEN, Forecast
from huorn.experts.policy import HALF_LIFE, POLICIES
from huorn.experts.prefetch import PrefetchRule
from huorn.model.cpu_decoder import CpuDecoder
from huorn.trace.engine_replay import STRIPES, ForecastUse, Pace, replay_engine
from huorn.trace.replay import replay_belady, replay_bypass, replay_policy
from huorn.trace.route_csv import LayerCall, RouteTrace

LAYERS, EXPERTS, TOP_K = 3, 10, 2


def rule(cap: int, threshold: float) -> PrefetchRule:
    return PrefetchRule((cap,) * LAYERS, threshold)


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
    """(misses, loads) of retention and prefetch with forecasts for all layers; dictionaries, and no class of huorn."""
    count = np.zeros((LAYERS, EXPERTS))
    share = 1 - 2 ** (-1 / HALF_LIFE)
    resident: set[tuple[int, int]] = set()
    misses = loads = 0
    assert how.weighting is not None
    assert how.prefetch is not None
    for step in range(len(trace.calls) // LAYERS):
        said, brought = forecasts[step], dict[int, set[tuple[int, int]]]()
        if said is None:
            worth = count * share * 0.4
        else:
            worth = (
                sum(b * said[:, g].astype(float) for g, b in enumerate(how.weighting.before))
                + FREQUENCY * count
            )
        before = count.copy()

        def least(barred: set[tuple[int, int]], worth: NDArray[np.float64] = worth) -> tuple[int, int] | None:
            return min(resident - barred, key=lambda expert: (worth[expert], expert), default=None)

        if said is not None:
            wanted = []
            for layer in range(LAYERS):
                able = [
                    e
                    for e in range(EXPERTS)
                    if (layer, e) not in resident and said[layer, 0, e] > how.prefetch.threshold
                ]
                able.sort(key=lambda e: (-said[layer, 0, e], e))
                wanted += [(layer, e) for e in able[: how.prefetch.caps[layer]]]
            if len(wanted) > room // 4:
                best = sorted(wanted, key=lambda one: -said[one[0], 0, one[1]])[: room // 4]
                wanted = [one for one in wanted if one in best]
            for one in wanted:
                if len(resident) >= room:
                    leaving = least(set().union(*brought.values()) if brought else set())
                    if leaving is None or worth[leaving] >= max(float(said[one[0], 0, one[1]]), worth[one]):
                        continue
                    resident.remove(leaving)
                resident.add(one)
                brought.setdefault(one[0], set()).add(one)
                loads += 1
        for layer in range(LAYERS):
            mine = [(layer, int(e)) for e in trace.calls[step * LAYERS + layer].ids[0]]
            missing = [one for one in mine if one not in resident]
            misses += len(missing)
            count[layer] *= 2 ** (-1 / HALF_LIFE)
            for one in mine:
                count[one] += 1
            if said is None:
                worth[layer] = count[layer] * share * 0.4
            else:
                later = sum(a * said[layer, g].astype(float) for g, a in enumerate(how.weighting.after))
                if not any(how.weighting.after):
                    later = before[layer] * share * 0.4
                worth[layer] = later + FREQUENCY * count[layer]
            brought.pop(layer, None)
            for one in missing:
                if len(resident) >= room:
                    held = set().union(*brought.values()) if brought else set()
                    leaving = least({*mine, *held}) or least(set(mine))
                    assert leaving is not None
                    resident.remove(leaving)
                resident.add(one)
                loads += 1
    return misses, loads


@settings(max_examples=80, deadline=None)
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
    how = ForecastUse(
        data.draw(st.sampled_from([MULTI_HORIZON, ONE_TOKEN])),
        rule(data.draw(st.integers(0, 4)), data.draw(st.sampled_from([0.0, 0.3, 0.9]))),
    )
    room = data.draw(st.integers(TOP_K, LAYERS * EXPERTS))
    found = replay_engine(trace, forecasts, room, how)
    assert (found.misses, found.loads) == simulated(trace, forecasts, room, how)
    assert found.all.lookups == len(trace.calls) * TOP_K
    assert found.late == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_without_forecasts_it_counts_as_the_plain_replay(policy: str) -> None:
    trace = made(200, 8)
    for room in (2, 5, 12, 25):
        found, want = (
            replay_engine(trace, [], room, ForecastUse(None, None, policy)),
            replay_policy(trace, policy, room),
        )
        assert (found.misses, found.loads, found.decode) == (want.misses, want.loads, want.decode)


def test_perfect_forecasts_leave_only_what_no_forecast_covers() -> None:
    trace = made(200, 1)
    found = replay_engine(trace, perfect(trace), 28, ForecastUse(prefetch=rule(TOP_K, 0.5)))
    assert found.misses == LAYERS * TOP_K  # the first step
    assert found.loads >= replay_belady(trace, 28).misses


def test_retention_lies_between_counting_and_the_optimum() -> None:
    trace = made(400, 2)
    for room in (8, 12, 16):
        several, one = (
            replay_engine(trace, perfect(trace), room, ForecastUse(weighting))
            for weighting in (MULTI_HORIZON, ONE_TOKEN)
        )
        lfu = replay_policy(trace, "lfu", room).misses
        assert replay_belady(trace, room).misses <= several.misses < lfu
        assert several.misses < one.misses < lfu
        assert several.prefetched == 0


def test_prefetch_alone_with_wrong_forecasts_costs_loads() -> None:
    trace = made(200, 3)
    wrong = [None if one is None else 1 - one for one in perfect(trace)]
    right, bad, none = (
        replay_engine(trace, said, 12, ForecastUse(None, rule(2, 0.5)))
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
    found = replay_engine(trace, said, 12, ForecastUse())
    assert 0 < found.misses < replay_policy(trace, "lfu", 12).misses


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 9999), room=st.integers(1, 12))
def test_bypass_is_never_worse_than_belady_and_at_most_brute_force(seed: int, room: int) -> None:
    """Calls of one expert, so that all orders of a short trace can be tried: after each call any subset that fits may stay."""
    rng = np.random.default_rng(seed)
    calls = tuple(
        LayerCall(0, rng.integers(0, 4, (1, 1)).astype(np.int32), True, 0, step) for step in range(9)
    )
    trace = RouteTrace("made", 1, 4, 1, (1,), calls)
    size = min(room, 3)
    best = {frozenset[int](): 0}
    for call in calls:
        key, then = int(call.ids[0, 0]), dict[frozenset[int], int]()
        for held, misses in best.items():
            cost, full = misses + (key not in held), held | {key}
            for kept in [full] if len(full) <= size else [full - {one} for one in full]:
                then[kept] = min(cost, then.get(kept, 99))
        best = then
    found = replay_bypass(trace, size)
    assert found.misses == min(best.values())
    assert found.misses <= replay_belady(trace, size).misses


# ---- time ----


def test_an_infinitely_fast_link_changes_no_count() -> None:
    trace = made(100, 5)
    how = ForecastUse(prefetch=rule(2, 0.5))
    free, fast = (
        replay_engine(trace, perfect(trace), 12, how, pace) for pace in (None, Pace(1.0, 1.0, 1e-9))
    )
    assert (free.misses, free.loads) == (fast.misses, fast.loads)
    assert fast.token_s == pytest.approx(LAYERS + 1, rel=1e-6)
    assert (
        fast.wait_s == pytest.approx(0, abs=1e-6) or fast.wait_s < 0.7
    )  # the last expert's share behind each miss


def test_misses_wait_for_a_slow_link_one_after_the_other() -> None:
    trace = made(50, 6)
    room, copy_s = 8, 5.0
    found = replay_engine(trace, [], room, ForecastUse(None), Pace(0.0, 0.0, copy_s))
    assert found.token_s == pytest.approx(found.misses * copy_s / 50)
    assert found.wait_s == pytest.approx(found.token_s)


def test_prefetch_hides_copies_behind_compute() -> None:
    trace = made(200, 7)
    pace = Pace(1.0, 3.0, 0.5)
    how = ForecastUse(prefetch=rule(2, 0.5))
    ahead = replay_engine(trace, perfect(trace), 10, how, pace)
    without = replay_engine(trace, [], 10, ForecastUse(None), pace)
    assert ahead.wait_s is not None
    assert without.wait_s is not None
    assert ahead.wait_s < 0.6 * without.wait_s
    assert ahead.late > 0  # those of the first layer have had no time


def test_a_demand_copy_waits_for_one_stripe_at_most() -> None:
    """Copies ahead for layer 2 are under way when layer 0 misses one."""
    ids = [
        np.array([[0, 1]], dtype=np.int32),
        np.array([[2, 3]], dtype=np.int32),
        np.array([[4, 5]], dtype=np.int32),
    ]
    calls = tuple(LayerCall(layer, ids[layer], True, 0, step) for step in range(2) for layer in range(3))
    trace = RouteTrace("made", 3, EXPERTS, TOP_K, (1,) * 3, calls[:3] + calls[:3])
    said = np.zeros((3, 3, EXPERTS), dtype=np.float32)
    said[2, :, 6:9] = 0.9  # three copies in vain
    copy_s = 6.0
    with_vain, alone = (
        replay_engine(trace, [None, forecast], 30, ForecastUse(None, rule(3, 0.5)), Pace(0.0, 0.0, copy_s))
        for forecast in (said, None)
    )
    assert with_vain.token_s is not None
    assert alone.token_s is not None
    assert with_vain.token_s - alone.token_s <= copy_s / STRIPES


def test_what_can_not_be_replayed_is_said() -> None:
    trace = made(3, 5)
    with pytest.raises(UsageError, match="a cache of 1 experts has no room for the 2"):
        replay_engine(trace, [None] * 3, 1, ForecastUse())
    uneven = RouteTrace(trace.model, LAYERS, EXPERTS, TOP_K, (1, 2, 1), trace.calls)
    with pytest.raises(UsageError, match="one size"):
        replay_engine(uneven, [None] * 3, 9, ForecastUse())


# ---- the engine itself ----


class Calls:
    """A tap that writes down the layer calls of a session."""

    def __init__(self) -> None:
        self.calls: list[LayerCall] = []
        self.decode = False

    def layer(
        self, number: int, hidden: object, logits: object, ids: NDArray[np.int32], weights: object
    ) -> None:
        self.calls.append(LayerCall(number, ids.copy(), self.decode))


@pytest.mark.parametrize("slots", [64, 128, 300])
@pytest.mark.parametrize("policy", POLICIES)
def test_replay_counts_what_the_engine_counted(policy: str, slots: int) -> None:
    """A prompt in one piece, then decode: hits and misses of the live cache, exactly."""
    session = Session.open(
        None, 256, residency=Residency(slots=slots, policy=policy, forecasting=Forecasting(OFF))
    )
    assert isinstance(session.decoder, CpuDecoder)
    assert session.cache is not None
    tap = session.decoder.tap = Calls()
    state = session.new_state()
    token, seen = state.read([5, 9, 2, 40, 33, 7, 300, 12]), []
    tap.decode = True
    for _ in range(60):
        token = state.read([int(token.full().argmax())])
        seen.append(session.cache.counts.misses)
    trace = RouteTrace("seedling", 8, 64, 8, (1,) * 8, tuple(tap.calls))
    found = replay_engine(trace, [], slots, ForecastUse(None, None, policy))
    counts = session.cache.counts
    assert (found.all.lookups, found.all.hits) == (counts.lookups, counts.hits)
    assert found.misses == counts.misses == seen[-1]
    assert all(before <= after for before, after in pairwise(seen))
