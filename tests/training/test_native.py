"""The fused kernels against float64 autograd of the plain formulas. BF16 tensors allow 2 % normwise, F32 ones 0.1 %."""

from __future__ import annotations

import shutil
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from training.native import ConvSilu, CrossEntropy, DeltaScan, GatedNorm, RMSNorm, RoutedExperts

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="training kernels need g++")

BF16 = torch.bfloat16


def normwise(got: Tensor, want: Tensor) -> float:
    return float(
        (got.double() - want).norm() / want.norm().clamp_min(1e-12)
    )  # a gradient may be exactly zero


def compare(fused: Callable[..., Tensor], plain: Callable[..., Tensor], inputs: list[Tensor]) -> None:
    """Outputs and the gradients of every floating input must agree for a random output gradient."""
    mine = [t.clone().requires_grad_(t.is_floating_point()) for t in inputs]
    reference = [t.double().requires_grad_() if t.is_floating_point() else t for t in inputs]
    got, want = fused(*mine), plain(*reference)
    limit = 0.02 if got.dtype == BF16 or any(t.dtype == BF16 for t in inputs) else 1e-3
    assert normwise(got.detach(), want.detach()) < limit
    grad = torch.randn(want.shape, generator=torch.Generator().manual_seed(1)).to(got.dtype)
    got.backward(grad)
    want.backward(grad.double())
    for index, (a, b) in enumerate(zip(mine, reference, strict=True)):
        if a.is_floating_point():
            assert a.grad is not None
            assert b.grad is not None
            assert normwise(a.grad, b.grad) < limit, f"gradient of input {index}"


def randn(*size: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_rms_norm() -> None:
    compare(
        lambda x, w: RMSNorm.apply(x, w, 1e-6),
        lambda x, w: x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * (1 + w),
        [randn(37, 48), randn(48, seed=1) * 0.1],
    )


def test_conv_silu() -> None:
    def plain(x: Tensor, w: Tensor) -> Tensor:
        return F.silu(F.conv1d(F.pad(x.transpose(1, 2), (3, 0)), w[:, None], groups=w.shape[0])).transpose(
            1, 2
        )

    compare(ConvSilu.apply, plain, [randn(2, 19, 24, dtype=BF16), randn(24, 4, seed=1)])


def test_gated_norm() -> None:
    compare(
        lambda o, z, w: GatedNorm.apply(o, z, w, 1e-6),
        lambda o, z, w: o * (o.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * w * F.silu(z),
        [randn(33, 64), randn(33, 64, dtype=BF16, seed=1), randn(64, seed=2)],
    )


@pytest.mark.parametrize("length", [1, 31, 32, 33, 70])
def test_delta_scan(length: int) -> None:
    def plain(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        q, k = q.repeat_interleave(2, dim=2), k.repeat_interleave(2, dim=2)
        state, out = q.new_zeros(2, 4, 64, 64), []
        for t in range(length):
            state = state * g[:, t].exp()[..., None, None]
            error = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhkv,bhk->bhv", state, k[:, t]))
            state = state + k[:, t, :, :, None] * error[:, :, None, :]
            out.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
        return torch.stack(out, dim=1)

    shape = (2, length)
    compare(
        DeltaScan.apply,
        plain,
        [
            randn(*shape, 2, 64),
            F.normalize(randn(*shape, 2, 64, seed=1), dim=-1),
            randn(*shape, 4, 64, dtype=BF16, seed=2),
            -F.softplus(randn(*shape, 4, seed=3)),
            randn(*shape, 4, seed=4).sigmoid(),
        ],
    )


def test_routed_experts() -> None:
    ids = randn(50, 7).topk(3, dim=-1).indices
    ids[ids == 4] = (
        6  # an expert nobody chose; one token may now hold the same expert twice, which is legal here
    )

    def plain(x: Tensor, chosen: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for k in range(3):
            gate, up = torch.einsum("td,tid->ti", x, gate_up[chosen[:, k]]).chunk(2, dim=-1)
            out = out + weights[:, k, None] * torch.einsum(
                "ti,tdi->td", F.silu(gate) * up, down[chosen[:, k]]
            )
        return out

    compare(
        RoutedExperts.apply,
        plain,
        [
            randn(50, 32, dtype=BF16),
            ids,
            randn(50, 3, seed=1).softmax(-1),
            randn(7, 32, 32, seed=2) * 0.2,
            randn(7, 32, 16, seed=3) * 0.2,
        ],
    )


def test_cross_entropy() -> None:
    target = torch.arange(40) % 21
    compare(
        lambda h, w: CrossEntropy.apply(h, w, target),
        lambda h, w: F.cross_entropy(h @ w.t(), target),
        [randn(40, 32, dtype=BF16), randn(21, 32, seed=1) * 0.3],
    )
