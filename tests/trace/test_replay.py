"""Replay against published counts of the same traces, against slow models, and the offline optimum against brute force."""

from __future__ import annotations

from itertools import combinations, pairwise
from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from huorn.errors import UsageError
from huorn.experts.policy import DEFAULT_POLICY, POLICIES, LayerPolicy, make_policy
from huorn.experts.worth import Frequency
from huorn.trace.replay import MIB, Replayed, replay, replay_belady, replay_policy
from huorn.trace.route_csv import RouteTrace

from .traces import recorded, recorded_file, trace_of


def replay_by_name(trace: RouteTrace, name: str, capacity: int) -> Replayed:
    return replay_belady(trace, capacity) if name == "belady" else replay_policy(trace, name, capacity)


@pytest.mark.parametrize(
    ("name", "policy", "capacity_mib", "published"),
    [
        ("qwen", "lru", 4000, (74.9, 80.3)),
        ("qwen", "lru", 2000, (52.7, 56.5)),
        ("qwen", "lru", 500, (0.0, 0.0)),
        ("qwen", "belady", 2000, (74.0, 79.4)),
        ("qwen", "belady", 4000, (86.5, 92.7)),
        ("gptoss", "lru", 3000, (32.4, 44.8)),
        ("gptoss", "belady", 3000, (49.0, 67.8)),
    ],
)
def test_published_hit_rates(
    name: str, policy: str, capacity_mib: int, published: tuple[float, float]
) -> None:
    """In percent, of all calls and of decode, as BigMoeOnEdge published them."""
    trace = recorded(name)
    result = replay_by_name(trace, policy, capacity_mib * MIB)
    assert (round(result.all.percent, 1), round(result.decode.percent, 1)) == published


@pytest.mark.parametrize(("name", "capacity_mib"), [("qwen", 4000), ("gptoss", 3000)])
def test_the_recorded_cache_hit_as_often(name: str, capacity_mib: int) -> None:
    """The traces hold, pair by pair, what the recording program's own LRU cache of that size had."""
    rows = [line.split(",") for line in recorded_file(name).read_text().splitlines() if line[0].isdigit()]
    decode = [row[7] for row in rows if row[1] == "1"]
    result = replay_policy(recorded(name), "lru", capacity_mib * MIB).decode
    assert (result.lookups, result.hits) == (len(decode), len(decode) - decode.count("0"))


def layer_lfu(trace: RouteTrace, capacity: int, strict: bool) -> tuple[float, float]:
    """The published layer-partitioned LFU: a count that grows by one per call and never decays, the least recent of equals goes,
    every layer has the same bytes and evicts after its call, but nothing that the call touched.

    Not strict: what a prompt touched stays beyond a layer's bytes until that layer's next call, as in the published count.
    """
    counts: dict[tuple[int, int], int] = {}
    last: dict[tuple[int, int], int] = {}
    residents: list[set[int]] = [set() for _ in range(trace.layers)]
    lookups, hits, now = [0, 0], [0, 0], 0
    for call in trace.calls:
        own, touched = residents[call.layer], set(call.ids.ravel().tolist())
        lookups[call.decode] += len(touched)
        hits[call.decode] += len(touched & own)
        for expert in call.ids.ravel().tolist():
            now += 1
            last[call.layer, expert] = now
        for expert in touched:
            counts[call.layer, expert] = counts.get((call.layer, expert), 0) + 1
        own |= touched

        def order(expert: int, layer: int = call.layer) -> tuple[int, int]:
            return counts[layer, expert], last[layer, expert]

        while len(own) * trace.expert_bytes[call.layer] > capacity // trace.layers:
            free = own - touched or (own if strict else set())
            if not free:
                break
            own.remove(min(free, key=order))
    return round(100 * sum(hits) / sum(lookups), 1), round(100 * hits[1] / lookups[1], 1)


def test_published_layer_lfu() -> None:
    """It comes out where a prompt may leave more than fits; kept to its bytes it is below the decayed one."""
    trace = recorded("qwen")
    assert layer_lfu(trace, 2000 * MIB, strict=False) == (59.1, 63.3)
    assert layer_lfu(trace, 2000 * MIB, strict=True) == (58.7, 62.9)
    result = replay_policy(trace, "layer-lfu", 2000 * MIB)
    assert result.all.percent > 58.7
    assert result.decode.percent > 62.9


@pytest.mark.parametrize("name", ["qwen", "gptoss"])
def test_the_default_has_no_cliff_on_recorded_traces(name: str) -> None:
    """From below one token's experts (4.7 % of all in Qwen, 1.6 % in gpt-oss) upwards every step of the cache gains."""
    trace = recorded(name)
    rates = [
        replay_policy(trace, DEFAULT_POLICY, int(trace.all_bytes * share)).decode.percent
        for share in (0.01, 0.03, 0.09)
    ]
    assert rates[0] > 3
    assert all(less + 10 < more for less, more in pairwise(rates))


@st.composite
def traces(draw: st.DrawFn, layers: int = 3, tokens: int = 3, even: bool = False) -> RouteTrace:
    """Decode over all layers, now and then a prompt; experts of one size, or of one per layer."""
    layers, experts = draw(st.integers(1, layers)), draw(st.integers(2, 5))
    top_k = draw(st.integers(1, 2))
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    calls = []
    for _ in range(draw(st.integers(1, 8))):
        length = int(generator.integers(1, tokens + 1))
        for layer in range(layers):
            ids = [generator.permutation(experts)[:top_k].tolist() for _ in range(length)]
            calls.append((layer, ids, length == 1))
    sizes = [10] * layers if even else generator.integers(5, 15, layers).tolist()
    return trace_of(layers, experts, calls, sizes)


def most_hits(trace: RouteTrace, slots: int) -> int:
    """The most hits of any choice of what to evict, by trying all; every call fits."""
    best: dict[frozenset[int], int] = {frozenset(): 0}  # residents -> hits so far
    for call in trace.calls:
        touched = frozenset(call.layer * trace.experts + int(expert) for expert in call.ids.ravel())
        after: dict[frozenset[int], int] = {}
        for residents, hits in best.items():
            others = residents - touched
            for kept in combinations(others, min(len(others), slots - len(touched))):
                state = touched | frozenset(kept)
                after[state] = max(after.get(state, 0), hits + len(touched & residents))
        best = after
    return max(best.values())


@settings(deadline=None, max_examples=60)
@given(trace=traces(layers=2, tokens=1, even=True), spare=st.integers(0, 3))
def test_belady_is_the_most_that_any_choice_could_reach(trace: RouteTrace, spare: int) -> None:
    slots = trace.top_k + spare
    most = most_hits(trace, slots)
    assert replay_belady(trace, 10 * slots).all.hits == most
    for name in POLICIES:
        assert replay_policy(trace, name, 10 * slots).all.hits <= most


@settings(deadline=None, max_examples=100)
@given(trace=traces(), spare=st.integers(0, 60))
def test_lru_against_one_list(trace: RouteTrace, spare: int) -> None:
    """Eviction after the call, oldest first, where every call fits; experts of different layers differ in size."""
    widest = max(len(set(call.ids.ravel().tolist())) for call in trace.calls)
    capacity = widest * max(trace.expert_bytes) + spare
    order: list[tuple[int, int]] = []
    hits = loaded = 0
    for call in trace.calls:
        touched = {(call.layer, int(expert)) for expert in call.ids.ravel()}
        hits += len(touched & set(order))
        loaded += trace.expert_bytes[call.layer] * len(touched - set(order))
        for expert in call.ids.ravel():
            key = (call.layer, int(expert))
            order = [other for other in order if other != key] + [key]
        while sum(trace.expert_bytes[layer] for layer, _ in order) > capacity:
            order.pop(0)
    result = replay_policy(trace, "lru", capacity)
    assert (result.all.hits, result.loaded_bytes) == (hits, loaded)


@settings(deadline=None, max_examples=100)
@given(trace=traces(tokens=6), name=st.sampled_from((*POLICIES, "belady")), slots=st.integers(1, 6))
def test_calls_larger_than_the_cache(trace: RouteTrace, name: str, slots: int) -> None:
    """Each distinct expert is looked up once and loaded once where it misses."""
    capacity = slots * max(trace.expert_bytes)
    result = replay_by_name(trace, name, capacity)
    distinct = [len(set(call.ids.ravel().tolist())) for call in trace.calls]
    assert result.all.lookups == sum(distinct)
    of_decode = [count for count, call in zip(distinct, trace.calls, strict=True) if call.decode]
    assert result.decode.lookups == sum(of_decode)
    assert 0 <= result.decode.hits <= result.all.hits
    if len(set(trace.expert_bytes)) == 1:
        assert result.loaded_bytes == trace.expert_bytes[0] * (result.all.lookups - result.all.hits)


class Watched(LayerPolicy):
    """Counts the bytes of its residents."""

    def __init__(self, trace: RouteTrace, capacity: int) -> None:
        super().__init__("watched", Frequency(trace.layers, trace.experts, 8), 3)
        self.expert_bytes, self.capacity, self.used = trace.expert_bytes, capacity, 0

    def admit(self, key: int) -> None:
        super().admit(key)
        self.used += self.expert_bytes[key // self._experts]
        assert self.used <= self.capacity

    def drop(self, key: int) -> None:
        super().drop(key)
        self.used -= self.expert_bytes[key // self._experts]


@settings(deadline=None, max_examples=50)
@given(trace=traces(tokens=6), spare=st.integers(0, 40))
def test_the_cache_never_exceeds_its_capacity(trace: RouteTrace, spare: int) -> None:
    capacity = max(trace.expert_bytes) + spare
    policy = Watched(trace, capacity)
    replay(trace, policy, capacity)
    assert policy.used > 0


def test_everything_fits() -> None:
    calls = [(0, [[0, 1]], False), (0, [[1, 2]], True), (0, [[0, 2]], True), (0, [[2, 0], [0, 1]], False)]
    for name in POLICIES:
        result = replay_policy(trace_of(1, 3, calls, [10]), name, 30)
        assert (result.all.lookups, result.all.hits, result.loaded_bytes) == (9, 6, 30)
        assert (result.decode.lookups, result.decode.hits) == (4, 3)
        assert result.decode.percent == 75


def test_no_room_for_one_expert() -> None:
    trace = trace_of(2, 3, [(0, [[0]], True)], [10, 12])
    with pytest.raises(UsageError, match=r"a cache of 11 bytes has no room for an expert of 12$"):
        replay_policy(trace, "lru", 11)
    with pytest.raises(UsageError, match="no cache policy"):
        replay_policy(trace, "none", 20)


def test_plain_counts_are_a_half_life_without_end() -> None:
    trace = recorded("qwen")
    slots = 2000 * MIB * trace.layers // sum(trace.expert_bytes)
    counted = replay(trace, make_policy("layer-lfu", trace.layers, trace.experts, slots, inf), 2000 * MIB)
    assert round(counted.decode.percent, 1) == 61.6  # every token of the prompt counts, not only every call
