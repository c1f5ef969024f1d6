"""Cache policies against models of them that look at everything, and what they promise in use."""

from __future__ import annotations

from math import inf
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from huorn.errors import UsageError
from huorn.experts.policy import DEFAULT_POLICY, HALF_LIFE, POLICIES, Policy, make_policy

from .models import SlowPolicy

Ids = NDArray[np.int32]


def ids_of(*tokens: list[int]) -> Ids:
    return np.array(tokens, dtype=np.int32)


def routed(generator: np.random.Generator, tokens: int, top_k: int, wanted: NDArray[np.float64]) -> Ids:
    """int32 [tokens, top_k], different experts per token, in proportion to `wanted`."""
    noise = generator.gumbel(size=(tokens, len(wanted))) + np.log(wanted)
    return np.argsort(-noise, axis=1)[:, :top_k].astype(np.int32)


class Cache:
    """A cache of `slots` slots around a policy. Misses go through in waves where a call touches more than fits."""

    def __init__(self, policy: Policy, experts: int, slots: int) -> None:
        self.policy, self.experts, self.slots = policy, experts, slots
        self.residents: set[int] = set()

    def call(self, layer: int, ids: Ids) -> tuple[int, int]:
        """(lookups, hits) of one layer call."""
        self.policy.use(layer, ids)
        touched = dict.fromkeys(layer * self.experts + expert for expert in ids.ravel().tolist())
        misses = [key for key in touched if key not in self.residents]
        protected = set(touched)
        for key in misses:
            if len(self.residents) == self.slots:
                leaving = self.policy.victim(layer, protected)
                if leaving is None:
                    assert self.residents <= protected
                    protected = set()
                    leaving = self.policy.victim(layer, protected)
                assert leaving in self.residents - protected
                self.residents.remove(leaving)
                self.policy.drop(leaving)
            self.residents.add(key)
            protected.add(key)
            self.policy.admit(key)
        return len(touched), len(touched) - len(misses)


@settings(deadline=None, max_examples=60)
@given(data=st.data(), name=st.sampled_from(POLICIES), half_life=st.sampled_from([1, None]))
def test_victims_are_those_of_the_slow_model(data: st.DataObject, name: str, half_life: int | None) -> None:
    layers, experts = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 9))
    slots = data.draw(st.integers(1, layers * experts))
    top_k = data.draw(st.integers(1, min(3, experts)))
    generator = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    policy = make_policy(name, layers, experts, slots, inf if half_life is None else half_life)
    slow = SlowPolicy(name, layers, experts, slots, half_life)
    keys = range(layers * experts)
    for _ in range(data.draw(st.integers(1, 12))):
        layer, tokens = int(generator.integers(layers)), int(generator.integers(1, 4))
        ids = routed(generator, tokens, top_k, generator.random(experts) + 0.1)
        policy.use(layer, ids)
        slow.history.append((layer, ids.tolist()))
        for key in generator.choice(keys, size=min(3, len(keys)), replace=False).tolist():  # prefetches too
            if key in slow.residents:
                policy.drop(key)
                slow.residents.remove(key)
            elif len(slow.residents) < slots:
                policy.admit(key)
                slow.residents.add(key)
        for share in (0.0, 0.5, 0.9, 1.0):
            protected = {key for key in keys if generator.random() < share}
            for layer in range(layers):
                assert policy.victim(layer, protected) == slow.victim(layer, protected)
    assert policy.scores().tolist() == [
        [slow.worth(layer * experts + expert) for expert in range(experts)] for layer in range(layers)
    ]


@pytest.mark.parametrize("name", POLICIES)
def test_a_cache_stays_consistent_under_batches_larger_than_it(name: str) -> None:
    layers, experts, top_k = 3, 12, 4
    for slots in (1, top_k, top_k + 1, 20):
        generator = np.random.default_rng(slots)
        cache = Cache(make_policy(name, layers, experts, slots), experts, slots)
        for step in range(60):
            for layer in range(layers):
                tokens = 16 if step % 10 == 0 else 1
                cache.call(layer, routed(generator, tokens, top_k, np.ones(experts)))
                assert len(cache.residents) <= slots


@pytest.mark.parametrize("name", POLICIES)
def test_slots_are_given_and_taken_once(name: str) -> None:
    policy = make_policy(name, 2, 4, 4)
    assert policy.victim(0, ()) is None
    policy.admit(5)
    assert policy.victim(0, ()) == 5
    assert policy.victim(0, {5}) is None
    with pytest.raises(AssertionError, match="expert 5 already has a slot"):
        policy.admit(5)
    policy.drop(5)
    assert policy.victim(1, ()) is None
    with pytest.raises(AssertionError, match="expert 5 has no slot to lose"):
        policy.drop(5)


def test_order_within_a_call() -> None:
    """The last token is the most recent, and in a token the last rank."""
    policy = make_policy("lru", 1, 8, 8)
    for key in range(8):
        policy.admit(key)
    policy.use(0, ids_of([3, 1], [2, 3], [7, 0]))
    order = []
    for _ in range(8):
        key = policy.victim(0, order)
        assert key is not None
        order.append(key)
    assert order == [4, 5, 6, 1, 2, 3, 7, 0]


def test_a_layer_takes_what_another_has_beyond_its_share() -> None:
    policy = make_policy("layer-lru", 3, 8, 8)  # shares 3, 3, 2
    for layer, ids in ((0, [0, 1, 2, 3]), (1, [0, 1, 2]), (2, [0])):
        policy.use(layer, ids_of(ids))
        for expert in ids:
            policy.admit(8 * layer + expert)
    assert policy.victim(2, ()) == 0  # short of its share: from layer 0, which has one too many
    assert policy.victim(1, ()) == 8  # has its share: of its own
    assert policy.victim(1, {8, 9, 10}) == 0  # all its own are in use
    assert policy.victim(0, {0}) == 1


def per_token(policy: Policy, layers: int, ids: Ids) -> None:
    for token in ids:
        for layer in range(layers):
            policy.use(layer, token[None])


@pytest.mark.parametrize("name", ["lfu", "layer-lfu"])
def test_a_prompt_counts_as_its_tokens_one_by_one(name: str) -> None:
    ids = routed(np.random.default_rng(0), 40, 4, np.linspace(0.1, 1, 32))
    whole, single = (make_policy(name, 2, 32, 16, half_life=1) for _ in range(2))
    for layer in range(2):
        whole.use(layer, ids)
    per_token(single, 2, ids)
    assert (whole.scores() == single.scores()).all()  # with half-life 1 and 40 tokens no sum is rounded


@pytest.mark.parametrize("name", ["lfu", "layer-lfu"])
def test_scores_halve_by_the_half_life(name: str) -> None:
    generator = np.random.default_rng(1)
    policy = make_policy(name, 1, 16, 8)
    policy.use(0, ids_of([15]))
    for _ in range(3):
        policy.use(0, routed(generator, int(HALF_LIFE), 4, np.r_[np.ones(15), 1e-30]))
    assert policy.scores()[0, 15] == pytest.approx(1 / 8, rel=1e-12)


@pytest.mark.parametrize("name", POLICIES)
def test_a_long_prompt_neither_empties_the_cache_nor_stays_in_it(name: str) -> None:
    """After 2048 tokens about something else, decode comes back to its rate within 40 tokens."""
    layers, experts, top_k, slots = 4, 64, 4, 96
    generator = np.random.default_rng(2)
    cache = Cache(make_policy(name, layers, experts, slots), experts, slots)
    usual = 0.85 ** np.arange(experts)

    def decode(tokens: int) -> float:
        counts = [
            cache.call(layer, routed(generator, 1, top_k, usual))
            for _ in range(tokens)
            for layer in range(layers)
        ]
        return sum(hits for _, hits in counts) / sum(lookups for lookups, _ in counts)

    decode(200)
    before = decode(200)
    for layer in range(layers):
        cache.call(layer, routed(generator, 2048, top_k, usual[::-1]))
    assert len(cache.residents) == slots
    decode(40)
    assert decode(200) > before - 0.03


def rate_below_a_token_cycle(name: str, slots: int) -> float:
    layers, experts, top_k = 10, 32, 4
    generator = np.random.default_rng(3)
    wanted = [generator.permutation(0.8 ** np.arange(experts)) for _ in range(layers)]
    cache = Cache(make_policy(name, layers, experts, slots), experts, slots)
    counts = [
        cache.call(layer, routed(generator, 1, top_k, wanted[layer]))
        for _ in range(200)
        for layer in range(layers)
    ]
    return sum(hits for _, hits in counts) / sum(lookups for lookups, _ in counts)


@pytest.mark.parametrize("slots", [30, 20, 10])
def test_the_default_has_no_cliff_below_one_token_cycle(slots: int) -> None:
    """10 layers x 4 experts per token are 40; a global LRU finds nothing where fewer fit."""
    assert rate_below_a_token_cycle("lru", slots) == 0
    assert rate_below_a_token_cycle(DEFAULT_POLICY, slots) > 0.3 * slots / 40


@pytest.mark.parametrize("name", POLICIES)
def test_a_session_goes_on_in_the_order_of_another(name: str) -> None:
    layers, experts = 3, 16
    first = make_policy(name, layers, experts, 20)
    generator = np.random.default_rng(4)
    for _ in range(30):
        for layer in range(layers):
            first.use(layer, routed(generator, 1, 3, np.linspace(0.01, 1, experts)))
    second = make_policy(name, layers, experts, 20)
    for key in range(0, 48, 2):  # before and after `start_from`
        second.admit(key)
    second.start_from(first.scores())
    for policy in (first, second):
        for key in range(48):
            if policy is first or key % 2:
                policy.admit(key)
    for layer in range(layers):
        gone: list[int] = []
        while (key := first.victim(layer, gone)) is not None:
            assert second.victim(layer, gone) == key
            gone.append(key)
        assert len(gone) == 48
    second.use(
        0, ids_of([5, 6, 7])
    )  # what is used now outlives the residents that came from before and are used no more
    assert second.scores()[0, [5, 6, 7]].min() >= 1
    if name.endswith("lru"):
        assert second.scores()[0, [5, 6, 7]].min() > np.delete(second.scores()[0], [5, 6, 7]).max()
    scores = first.scores()
    scores[:] = -1  # a copy
    assert (first.scores() >= 0).all()


def test_scores_of_another_kind_are_outlived() -> None:
    """Moments of an LRU session, up to 40,000, next to counts that never exceed 12."""
    scores = np.full((1, 8), 40_000.0)
    scores[0, :2] = 0
    policy = make_policy("lfu", 1, 8, 2)
    policy.start_from(scores)
    for _ in range(3 * int(HALF_LIFE)):
        policy.use(0, ids_of([0, 1]))
    assert policy.scores()[0, :2].min() > policy.scores()[0, 2:].max()


def test_unknown_names() -> None:
    with pytest.raises(UsageError, match=r"no cache policy 'mru'; there are lfu, layer-lfu, lru, layer-lru$"):
        make_policy("mru", 1, 1, 1)
    arguments: Any = (40, 256, 5000)
    assert [make_policy(name, *arguments).name for name in POLICIES] == list(POLICIES)
    assert DEFAULT_POLICY in POLICIES
