"""Both norms against their formula in float64."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from huorn.model.norm import GatedRMSNorm, RMSNorm

EPS = 1e-3  # large enough to be seen


def exact(x: Tensor, scale: Tensor) -> Tensor:
    x = x.double()
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) / x.shape[-1] + EPS) * scale.double()


def test_norms() -> None:
    generator = torch.Generator().manual_seed(0)
    x, z = torch.randn(2, 3, 4, 9, generator=generator) * 0.05
    weight = torch.randn(9, generator=generator).bfloat16()
    zero_centered = RMSNorm.zero_centered(weight, EPS)(x)
    assert zero_centered.dtype == torch.float32
    assert torch.allclose(zero_centered.double(), exact(x, 1 + weight.double()), atol=1e-6)
    gated = GatedRMSNorm(weight.float(), EPS)(x, z)
    assert torch.allclose(gated.double(), exact(x, weight) * F.silu(z.double()), atol=1e-6)
