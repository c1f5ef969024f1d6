"""Where numbers are rounded: the two precisions of the reference decoder."""

from __future__ import annotations

from enum import Enum

import torch
from torch import Tensor

from huorn.checkpoint.weight import Weight


class Precision(Enum):
    """What the operands of a matmul are rounded to; everything else is F32 in both.

    Always F32: residual stream, norms, rotary, router logits and weights, softmax, gates, convolution,
    delta-net state, every accumulator and every result of a matmul. In BF16 both operands of a matmul are
    rounded to BF16 and multiplied as F32: a product of two BF16 numbers (8-bit significands) is exact in
    F32 (24 bits), so this equals a BF16 matmul with F32 accumulation and no rounding of its result.
    """

    F32 = "f32"
    BF16 = "bf16"

    @property
    def kv_dtype(self) -> torch.dtype:
        """Dtype of the KV cache."""
        return torch.bfloat16 if self is Precision.BF16 else torch.float32

    def operand(self, x: Tensor) -> Tensor:
        """x f32 rounded to the operand dtype, returned as f32 of the same shape."""
        return x.bfloat16().float() if self is Precision.BF16 else x

    def matrix(self, weight: Weight) -> Tensor:
        """The weight [O, I] as a matmul operand in f32.

        An FP8 weight enters as code * scale in F32 and is not rounded: only 29 % of those products fit BF16,
        and rounding them would change the model.
        """
        expanded = weight.expand()
        return expanded if weight.scale_inv is not None else self.operand(expanded)
