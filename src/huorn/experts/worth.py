"""What an expert in a slot is worth: the later it was used, or the more often."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Worth = NDArray[np.float64]  # [layers, experts], higher = keep longer, 0 = never used


class Valuation(Protocol):
    """Keeps one number per expert of the model, resident or not."""

    worth: Worth

    def use(self, layer: int, ids: NDArray[np.int32]) -> None:
        """One layer call routed to these experts: ids int32 [T, K]. Only row `layer` of `worth` changes."""
        ...

    def start_from(self, worth: Worth) -> None:
        """Begin with what an earlier session knew, of this valuation or of another: only its order is sure to count."""
        ...


class Recency:
    """Worth is the moment of last use, one moment per routed pair.

    The order within a call is token after token, and rank after rank within a token: of two experts of one token the one of
    lower rank (more routing weight) is older. The published counts of BigMoeOnEdge come out with this order and no other that
    was tried (tests/trace/test_replay.py).
    """

    def __init__(self, layers: int, experts: int) -> None:
        self.worth: Worth = np.zeros((layers, experts))
        self._now = 0  # float64 counts exactly up to 2**53: 28 million years of 320 pairs per token and 10 tokens per second

    def use(self, layer: int, ids: NDArray[np.int32]) -> None:
        """Of an expert named twice the last moment stays: numpy assigns in order."""
        self.worth[layer, ids.ravel()] = np.arange(self._now + 1, self._now + 1 + ids.size)
        self._now += ids.size

    def start_from(self, worth: Worth) -> None:
        """Moments 1, 2, ... in the order of `worth`; equals in the order of their keys."""
        order = np.argsort(worth.ravel(), kind="stable")
        used = order[worth.ravel()[order] > 0]
        self.worth.ravel()[used] = np.arange(1, len(used) + 1)
        self._now = len(used)


class Frequency:
    """Worth is how often, an old use counting less: it halves with every `half_life` tokens that the layer has seen since.

    A use by token t of a call of T tokens is T - 1 - t tokens old when the call ends, so a prompt of any length leaves what its
    last half-lives used, in the measure that decode goes on with, and worth never exceeds 1 / (1 - 2**(-1 / half_life)). Ages
    count by a layer's own tokens: while a call of 512 tokens goes through the layers, those it has not reached yet must not look
    512 tokens younger than those behind it.
    """

    def __init__(self, layers: int, experts: int, half_life: float) -> None:
        """half_life in tokens, > 0; infinite is a plain count."""
        self.worth: Worth = np.zeros((layers, experts))
        self._half_life = half_life

    def use(self, layer: int, ids: NDArray[np.int32]) -> None:
        """O(T K + experts): no loop over pairs."""
        tokens, ranks = ids.shape
        row = self.worth[layer]
        row *= 2.0 ** (-tokens / self._half_life)
        if tokens == 1:
            row[ids[0]] += 1.0  # 9 us less than the general way, 40 times per decoded token
            return
        weights = np.exp2(-np.arange(tokens - 1, -1, -1) / self._half_life)
        row += np.bincount(ids.ravel(), np.repeat(weights, ranks), minlength=len(row))

    def start_from(self, worth: Worth) -> None:
        """Scaled down where it exceeds what use could have given, so that it is outlived in a few half-lives."""
        most = 1 / -np.expm1(-np.log(2) / self._half_life) if np.isfinite(self._half_life) else np.inf
        self.worth[:] = worth * min(1.0, most / max(worth.max(), 1e-300))
