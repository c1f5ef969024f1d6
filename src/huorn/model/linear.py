"""Matrices that stay as they are stored until they are used, or are expanded to F32 once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from huorn.checkpoint.fp8 import BLOCK
from huorn.checkpoint.weight import Weight
from huorn.model.precision import Precision

CHUNK_BYTES = 64 << 20  # F32 bytes of one row chunk: 1.9 GiB at once would be the lm_head of the 35B shape


class Linear:
    """y = x @ W.T where W [O, I] stacks the given weights by rows: projections of one input are one matmul.

    With expand=True W is expanded to F32 once. Otherwise the weights stay in their stored dtype and each use
    expands them in row chunks of at most CHUNK_BYTES, which are the only extra memory.
    """

    def __init__(self, weights: Sequence[Weight], precision: Precision, expand: bool) -> None:
        self.outputs = sum(weight.shape[0] for weight in weights)
        self.precision = precision
        self.stored = () if expand else tuple(weights)
        self.expanded = torch.cat([precision.matrix(weight) for weight in weights]) if expand else None

    def __call__(self, x: Tensor) -> Tensor:
        """x f32 [T, I], already rounded to the operand dtype -> f32 [T, O]."""
        if self.expanded is not None:
            return F.linear(x, self.expanded)
        return torch.cat([F.linear(x, chunk) for chunk in self._chunks()], dim=-1)

    def _chunks(self) -> Iterator[Tensor]:
        """W as f32 row chunks [<= rows, I], one at a time."""
        for weight in self.stored:
            for rows in row_chunks(weight):
                yield self.precision.matrix(rows)


def row_chunks(weight: Weight) -> Iterator[Weight]:
    """Cuts a weight [O, I] into views of whole rows of FP8 blocks that expand to at most about CHUNK_BYTES."""
    outputs, inputs = weight.data.shape
    rows = max(BLOCK, CHUNK_BYTES // (4 * inputs) // BLOCK * BLOCK)
    for start in range(0, outputs, rows):
        scale = weight.scale_inv
        scale_rows = None if scale is None else scale[start // BLOCK : (start + rows) // BLOCK]
        yield Weight(weight.data[start : start + rows], scale_rows, weight.name)


class Embedding:
    """The token table [V, D] in its stored dtype; only the rows asked for are expanded."""

    def __init__(self, weight: Weight, precision: Precision) -> None:
        self.weight = weight
        self.precision = precision

    def __call__(self, token_ids: Tensor) -> Tensor:
        """token_ids int64 [T] -> f32 [T, D]."""
        return self.precision.matrix(Weight(self.weight.data[token_ids]))
