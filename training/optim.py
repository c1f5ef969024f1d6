"""Muon for matrices and AdamW for the rest, on one flat buffer that several processes share.

Muon (Jordan et al., 2024): momentum, then the nearest semi-orthogonal matrix by Newton-Schulz iteration; the update is
scaled by 0.2 sqrt(max(rows, columns)) so that its root mean square matches AdamW's and one learning rate serves both
(Liu et al., "Muon is scalable for LLM training", 2025).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

MOMENTUM, WEIGHT_DECAY = 0.95, 0.1
# Peak learning rates; the embedding's is high because each of its rows sees few tokens.
MATRIX_RATE, HEAD_RATE, EMBEDDING_RATE, OTHER_RATE = 3e-3, 4e-3, 1e-2, 3e-3
BETA1, BETA2, EPS = 0.9, 0.95, 1e-8
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # quintic coefficients of Jordan et al.


def is_matrix(name: str, shape: torch.Size) -> bool:
    """Muon takes the hidden matrices; embedding, head, router, gates, norms, convolution and decay go to AdamW."""
    others = (
        "embed_tokens",
        "lm_head",
        "mlp.gate.",
        "shared_expert_gate",
        "in_proj_a",
        "in_proj_b",
        "conv1d",
    )
    return len(shape) >= 2 and not any(part in name for part in others)


def peak_rate(name: str, shape: torch.Size) -> float:
    """Peak learning rate of a tensor."""
    if is_matrix(name, shape):
        return MATRIX_RATE
    return {"embed_tokens.weight": EMBEDDING_RATE, "lm_head.weight": HEAD_RATE}.get(name, OTHER_RATE)


class Flat:
    """Tensors of the given shapes as views of one F32 buffer, which can be shared between processes."""

    def __init__(self, shapes: Mapping[str, torch.Size], buffer: Tensor | None = None) -> None:
        total = sum(math.prod(shape) for shape in shapes.values())
        self.buffer = torch.zeros(total) if buffer is None else buffer
        self.views: dict[str, Tensor] = {}
        at = 0
        for name, shape in shapes.items():
            size = math.prod(shape)
            self.views[name] = self.buffer[at : at + size].view(shape)
            at += size


def orthogonalise(batch: Tensor) -> Tensor:
    """Five Newton-Schulz steps on [N, rows, columns] bf16: singular values go to about 1, singular vectors stay."""
    wide = batch if batch.shape[1] <= batch.shape[2] else batch.transpose(1, 2)
    x: Tensor = wide / (wide.norm(dim=(1, 2), keepdim=True) + 1e-7)
    a, b, c = NEWTON_SCHULZ
    for _ in range(5):
        gram = x @ x.transpose(1, 2)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x if batch.shape[1] <= batch.shape[2] else x.transpose(1, 2)


@dataclass(frozen=True)
class Optimizer:
    """Steps a subset of the weights; `first` and `second` are the moments, laid out like the weights."""

    weights: Flat
    first: Flat
    second: Flat
    names: tuple[str, ...]

    def step(self, gradients: Mapping[str, Tensor], share: float, step: int) -> None:
        """One update of `names` at `share` of the peak rates. step counts from 1. gradients are means, F32."""
        for name in self.names:
            weight, grad = self.weights.views[name], gradients[name]
            lr = share * peak_rate(name, weight.shape)
            if is_matrix(name, weight.shape):
                self._muon(name, weight, grad, lr)
            else:
                self._adamw(name, weight, grad, lr, step)

    def _muon(self, name: str, weight: Tensor, grad: Tensor, lr: float) -> None:
        momentum = self.first.views[name]
        momentum.lerp_(grad, 1 - MOMENTUM)
        update = grad.lerp(momentum, MOMENTUM).to(torch.bfloat16)
        parts = 2 if name.endswith("gate_up_proj") else 1  # gate and up are two matrices in one tensor
        batch = update.view(-1, weight.shape[-2] // parts, weight.shape[-1])
        scale = 0.2 * max(batch.shape[1:]) ** 0.5
        weight.mul_(1 - lr * WEIGHT_DECAY).add_(orthogonalise(batch).reshape(weight.shape), alpha=-lr * scale)

    def _adamw(self, name: str, weight: Tensor, grad: Tensor, lr: float, step: int) -> None:
        first, second = self.first.views[name], self.second.views[name]
        first.lerp_(grad, 1 - BETA1)
        second.mul_(BETA2).addcmul_(grad, grad, value=1 - BETA2)
        root = (second / (1 - BETA2**step)).sqrt_().add_(EPS)
        if weight.dim() > 1:
            weight.mul_(1 - lr * WEIGHT_DECAY)
        weight.addcdiv_(first / (1 - BETA1**step), root, value=-lr)


def split_work(shapes: Mapping[str, torch.Size], ranks: int) -> list[tuple[str, ...]]:
    """Give each rank tensors of about the same total size, largest first."""
    loads, shares = [0] * ranks, [list[str]() for _ in range(ranks)]
    for name in sorted(shapes, key=lambda n: -math.prod(shapes[n])):
        rank = loads.index(min(loads))
        loads[rank] += math.prod(shapes[name])
        shares[rank].append(name)
    return [tuple(share) for share in shares]
