"""The figures of routing against sets and counts in plain Python."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from huorn.trace.routing_stats import chance_hottest_quarter, hottest_quarter, overlap


def random_ids(seed: int, tokens: int, layers: int, top_k: int, experts: int) -> np.ndarray:
    """Lower ids are chosen more often, and other ones in each layer."""
    generator = np.random.default_rng(seed)
    chance = 1.0 / np.arange(1, experts + 1)
    rows = [
        [
            (generator.choice(experts, top_k, replace=False, p=chance / chance.sum()) + layer) % experts
            for layer in range(layers)
        ]
        for _ in range(tokens)
    ]
    return np.array(rows, dtype=np.int32)


@pytest.mark.parametrize("seed", range(5))
def test_overlap_is_that_of_sets(seed: int) -> None:
    ids = random_ids(seed, 7, 3, 4, 11)
    shares = [
        len(set(ids[t, layer].tolist()) & set(ids[t + 1, layer].tolist())) / 4
        for t in range(6)
        for layer in range(3)
    ]
    assert overlap(ids) == pytest.approx(sum(shares) / len(shares), rel=1e-12)


@pytest.mark.parametrize("experts", [8, 11, 16])
def test_hottest_quarter_is_that_of_counts(experts: int) -> None:
    ids = random_ids(1, 20, 3, 4, experts)
    shares = []
    for layer in range(3):
        counts = Counter(ids[:, layer].flatten().tolist())
        shares.append(sum(count for _, count in counts.most_common(experts // 4)) / (20 * 4))
    assert hottest_quarter(ids, experts) == pytest.approx(sum(shares) / 3, rel=1e-12)


def test_extremes() -> None:
    still = np.broadcast_to(np.arange(2, dtype=np.int32), (5, 3, 2))
    assert overlap(still) == 1.0
    assert hottest_quarter(still, 8) == 1.0
    turning = (still + 2 * np.arange(5, dtype=np.int32)[:, None, None]) % 8
    assert overlap(turning) == 0.0
    assert hottest_quarter(turning[:4], 8) == 0.25


def test_by_chance() -> None:
    """Many tokens use all experts evenly; one token has K of them, all in the hottest quarter where K is no more."""
    assert chance_hottest_quarter(20_000, 16, 4) == pytest.approx(0.25, abs=0.01)
    assert chance_hottest_quarter(1, 16, 4) == 1.0
    few = [hottest_quarter(uniform(seed, 30, 2, 4, 16), 16) for seed in range(50)]
    assert chance_hottest_quarter(30, 16, 4) == pytest.approx(sum(few) / 50, abs=0.02)


def uniform(seed: int, tokens: int, layers: int, top_k: int, experts: int) -> np.ndarray:
    generator = np.random.default_rng(seed)
    rows = [[generator.choice(experts, top_k, replace=False) for _ in range(layers)] for _ in range(tokens)]
    return np.array(rows, dtype=np.int32)
