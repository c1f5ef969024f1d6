"""The output head of the decoder on native kernels: the last norm, and lm_head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Protocol

import torch
from torch import Tensor

from huorn import _native
from huorn.kernels.operand import Operand
from huorn.model.next_token import FullLogits, NextToken
from huorn.model.tables import LmHead


@dataclass(frozen=True, eq=False)
class Norm:
    """x / sqrt(mean(x^2) + eps) * scale; scale f32 [D]."""

    scale: Tensor
    eps: float


class Head(Protocol):
    """From hidden states to logits."""

    @property
    def kind(self) -> LmHead:
        """Whether it takes two passes."""
        ...

    def full(self, runtime: _native.Runtime, x: Tensor, columns: int) -> Tensor:
        """x f32 [T, D], before the norm -> all logits f32 [T, V]; `columns` tokens per pass over the weights."""
        ...

    def next_tokens(self, runtime: _native.Runtime, x: Tensor, columns: int) -> Sequence[NextToken]:
        """x f32 [S, D], one row per sequence, which is kept until the logits are asked for -> the next token of each."""
        ...


@dataclass(eq=False)
class FullHead:
    """lm_head as a weight in RAM, every row of which is multiplied for every token."""

    weight: Operand
    norm: Norm
    kind: LmHead = field(default="full", init=False)

    def full(self, runtime: _native.Runtime, x: Tensor, columns: int) -> Tensor:
        """As Head.full."""
        out = torch.empty(len(x), self.weight.data.shape[0])
        product(runtime, self._matrix, self.norm, x, columns, out)
        return out

    def next_tokens(self, runtime: _native.Runtime, x: Tensor, columns: int) -> Sequence[NextToken]:
        """As Head.next_tokens: one pass over the weights for all of them."""
        logits = cache(lambda: self.full(runtime, x, columns))
        return [FullLogits(lambda n=n: logits()[n]) for n in range(len(x))]  # type: ignore[misc]

    @cached_property
    def _matrix(self) -> _native.Matrix:
        return self.weight.matrix()


def product(
    runtime: _native.Runtime, matrix: _native.Matrix, norm: Norm, x: Tensor, columns: int, out: Tensor
) -> None:
    """Writes norm(x) f32 [T, D] times the rows of the matrix to out f32 [T, rows]."""
    runtime.linear(
        matrix, norm.scale.data_ptr(), norm.eps, x.data_ptr(), len(x), min(columns, len(x)), out.data_ptr()
    )
