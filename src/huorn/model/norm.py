"""RMS norms over the last dimension, with and without a gate."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, eq=False)
class RMSNorm:
    """x / sqrt(mean(x^2) + eps) * scale, all F32, scale f32 [N]. The checkpoint stores w = scale - 1."""

    scale: Tensor
    eps: float

    @classmethod
    def zero_centered(cls, weight: Tensor, eps: float) -> RMSNorm:
        """From a stored w [N] of any float dtype: scale = 1 + w in F32."""
        return cls(1.0 + weight.float(), eps)

    def __call__(self, x: Tensor) -> Tensor:
        """x f32 [..., N] -> f32 [..., N]."""
        return F.rms_norm(x, self.scale.shape, self.scale, self.eps)


@dataclass(frozen=True, eq=False)
class GatedRMSNorm:
    """The norm behind the delta rule, times silu(z). scale f32 [N] is the weight as stored, with no 1 added."""

    scale: Tensor
    eps: float

    def __call__(self, x: Tensor, z: Tensor) -> Tensor:
        """x, z f32 [..., N] -> f32 [..., N]."""
        return F.rms_norm(x, self.scale.shape, self.scale, self.eps) * F.silu(z)
