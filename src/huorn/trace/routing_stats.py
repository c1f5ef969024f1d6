"""Two figures of routing that a cache of experts lives from, and what the second would be by chance."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def overlap(ids: NDArray[np.int32]) -> float:
    """The share of a token's routed experts that the next token uses again, averaged over tokens and layers.

    ids int32 [T >= 2, L, K]: of consecutive tokens of one sequence, K different experts in each row. 0 to 1; independent
    uniform routing has K / E.
    """
    again = int(np.count_nonzero(ids[1:, :, :, None] == ids[:-1, :, None, :]))
    return again / ids[1:].size


def hottest_quarter(ids: NDArray[np.int32], experts: int) -> float:
    """The share of routed pairs that go to the most used quarter of each layer's experts, averaged over layers.

    ids int32 [T >= 1, L, K] of expert ids below `experts`, of any tokens. 0.25 for even use; few tokens give more, since some
    experts are used more often by chance (`chance_hottest_quarter`).
    """
    shares = [
        np.sort(np.bincount(layer.ravel(), minlength=experts))[::-1][: experts // 4].sum() / layer.size
        for layer in ids.transpose(1, 0, 2)
    ]
    return float(np.mean(shares))


def chance_hottest_quarter(tokens: int, experts: int, top_k: int) -> float:
    """The `hottest_quarter` of `tokens` tokens that route independently and uniformly: mean of 16 seeded layers."""
    generator = np.random.Generator(np.random.PCG64(0))
    ids = generator.random((tokens, 16, experts), dtype=np.float32).argpartition(top_k, axis=-1)[..., :top_k]
    return hottest_quarter(ids.astype(np.int32), experts)
