"""Plans: every routed pair once, in chunks of one expert, against a plan made the slow way."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from huorn.kernels.isa import ALL
from huorn.schedule.plan import BUCKET_TOKENS, Plan
from huorn.schedule.shapes import Use, columns

Ids = NDArray[np.int32]


@st.composite
def routings(draw: st.DrawFn) -> Ids:
    """int32 [T, K]: K different experts per token, some experts much more wanted than others."""
    experts = draw(st.sampled_from([1, 2, 5, 16, 64, 256]))
    top_k = draw(st.integers(1, min(8, experts)))
    tokens = draw(st.integers(1, 80))
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    wanted = generator.random((tokens, experts)) + draw(st.floats(0, 2)) * np.linspace(0, 1, experts)
    order: Ids = np.argsort(-wanted, axis=1)[:, :top_k].astype(np.int32)
    return np.ascontiguousarray(order)


def slow_bucketed(ids: Ids, most: int) -> tuple[list[int], list[tuple[int, int, int]]]:
    pairs: list[int] = []
    chunks = []
    by_pair = [int(expert) for row in ids for expert in row]
    for expert in sorted(set(by_pair)):
        own = [pair for pair, chosen in enumerate(by_pair) if chosen == expert]
        for start in range(0, len(own), most):
            few = own[start : start + most]
            chunks.append((expert, len(pairs), len(few)))
            pairs += few
    return pairs, chunks


def slow_per_pair(ids: Ids) -> tuple[list[int], list[tuple[int, int, int]]]:
    by_pair = [int(expert) for row in ids for expert in row]
    return list(range(len(by_pair))), [(expert, pair, 1) for pair, expert in enumerate(by_pair)]


def parts(plan: Plan) -> tuple[list[int], list[tuple[int, int, int]]]:
    return plan.pairs.tolist(), [tuple(chunk) for chunk in plan.chunks.tolist()]


def check(plan: Plan, ids: Ids, most: int) -> None:
    """What the kernels rely on."""
    for array in (plan.pairs, plan.chunks):
        assert array.dtype == np.int32
        assert array.flags.c_contiguous
    assert plan.chunks.shape[1:] == (3,)
    assert sorted(plan.pairs.tolist()) == list(range(ids.size))
    covered = np.zeros(ids.size, dtype=int)
    for expert, first, count in plan.chunks.tolist():
        assert 1 <= count <= most
        covered[first : first + count] += 1
        assert (ids.ravel()[plan.pairs[first : first + count]] == expert).all()
    assert (covered == 1).all()


@settings(max_examples=200, deadline=None)
@given(ids=routings(), most=st.integers(1, 130))
def test_bucketed(ids: Ids, most: int) -> None:
    plan = Plan.bucketed(ids, most)
    check(plan, ids, most)
    assert parts(plan) == slow_bucketed(ids, most)
    passes = Counter(expert for expert, _, _ in plan.chunks.tolist())
    assert passes == {expert: -(-count // most) for expert, count in Counter(ids.ravel().tolist()).items()}
    for expert in passes:  # tokens in order within one expert
        own = [int(pair) for pair in plan.pairs if ids.ravel()[pair] == expert]
        assert own == sorted(own)


@settings(max_examples=100, deadline=None)
@given(ids=routings())
def test_per_pair(ids: Ids) -> None:
    plan = Plan.per_pair(ids)
    check(plan, ids, 1)
    assert parts(plan) == slow_per_pair(ids)


@settings(max_examples=100, deadline=None)
@given(ids=routings(), most=st.integers(1, 130))
def test_few_tokens_run_pair_by_pair_and_many_in_buckets(ids: Ids, most: int) -> None:
    plan = Plan.of(ids, most)
    check(plan, ids, most)
    slow = slow_per_pair(ids) if ids.shape[0] < BUCKET_TOKENS else slow_bucketed(ids, most)
    assert parts(plan) == slow


@pytest.mark.parametrize("tokens", [BUCKET_TOKENS - 1, BUCKET_TOKENS])
def test_where_buckets_begin(tokens: int) -> None:
    ids = np.zeros((tokens, 1), dtype=np.int32)
    assert len(Plan.of(ids, 64).chunks) == (tokens if tokens < BUCKET_TOKENS else 1)


@pytest.mark.parametrize("most", [1, 3, 4, 5, 11, 12, 13, 64])
def test_all_tokens_on_one_expert(most: int) -> None:
    ids = np.full((12, 1), 200, dtype=np.int32)
    plan = Plan.bucketed(ids, most)
    check(plan, ids, most)
    assert len(plan.chunks) == -(-12 // most)


def test_a_bucketed_plan_by_hand() -> None:
    ids = np.array([[7, 2], [2, 9], [7, 2], [0, 2], [2, 7]], dtype=np.int32)
    plan = Plan.bucketed(ids, 2)
    assert plan.pairs.tolist() == [6, 1, 2, 5, 7, 8, 0, 4, 9, 3]
    assert plan.chunks.tolist() == [
        [0, 0, 1],
        [2, 1, 2],
        [2, 3, 2],
        [2, 5, 1],
        [7, 6, 2],
        [7, 8, 1],
        [9, 9, 1],
    ]


@pytest.mark.parametrize("use", ["dense", "expert"])
@pytest.mark.parametrize("isa", ALL)
def test_columns_of_every_variant(isa: str, use: Use) -> None:
    assert columns("cpu", isa, use) >= 1


def test_columns_of_something_else() -> None:
    with pytest.raises(KeyError):
        columns("cpu", "sse9", "dense")
    with pytest.raises(KeyError):
        columns("tpu", "amx", "dense")
