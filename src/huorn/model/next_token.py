"""What a decoder says of the next token: all logits, or the largest ones, whichever is asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Adjustment:
    """What is done to the logits of some ids before any two are compared: penalties, biases, a mask (minus infinity).

    l becomes l / repetition where l > 0, else l * repetition, less `minus`. For each id the larger of two logits stays at least
    as large, in real numbers and rounded, so that bounds of a logit become bounds of the adjusted one.
    """

    ids: Tensor  # int64 [n], ascending, each once
    repetition: float  # above 0
    minus: Tensor  # f64 [n]

    def apply(self, logits: Tensor, ids: Tensor | None = None) -> None:
        """Adjusts logits f64 [N] in place; they are those of `ids` int64 [N], ascending, or of all ids."""
        if ids is None:
            logits[self.ids] = self.of(logits[self.ids], self.minus)
            return
        places = torch.searchsorted(self.ids, ids).clamp_(max=len(self.ids) - 1)
        met = self.ids[places] == ids
        logits[met] = self.of(logits[met], self.minus[places[met]])

    def of(self, logits: Tensor, minus: Tensor) -> Tensor:
        """f64 [m] of logits f64 [m] and what is taken from each."""
        return torch.where(logits > 0, logits / self.repetition, logits * self.repetition) - minus


@dataclass(frozen=True, eq=False)
class Candidates:
    """Logits f32 [n] of ids int64 [n], ascending; of all ids in the vocabulary where `ids` is None."""

    ids: Tensor | None
    logits: Tensor


class NextToken(Protocol):
    """The logits after the last token of a sequence; computed when asked for, and so not after each part of a prompt."""

    def full(self) -> Tensor:
        """All of them, f32 [V]. Raises CheckpointError when weights can not be read."""
        ...

    def largest(self, k: int, adjustment: Adjustment | None = None) -> Candidates:
        """Ids among which are the k largest after the adjustment, with every id that ties with the last of them; their logits are
        those of `full`, to the bit, and not adjusted. k >= 1. Raises CheckpointError when weights can not be read."""
        ...


class FullLogits:
    """All logits of one next token, made when they are first asked for."""

    def __init__(self, make: Callable[[], Tensor]) -> None:
        """`make` returns f32 [V]."""
        self._make = make

    @classmethod
    def of(cls, logits: Tensor) -> FullLogits:
        """Logits f32 [V] that are there already."""
        return cls(lambda: logits)

    def full(self) -> Tensor:
        """f32 [V]."""
        return self._logits

    def largest(self, k: int, adjustment: Adjustment | None = None) -> Candidates:
        """All of them."""
        return Candidates(None, self._logits)

    @cached_property
    def _logits(self) -> Tensor:
        return self._make()
