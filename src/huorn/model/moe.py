"""Mixture-of-experts block: the router chooses, routed pairs run by expert, their sum goes in rank order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from huorn.model.linear import Linear
from huorn.model.precision import Precision


@dataclass(frozen=True, eq=False)
class Routing:
    """The router's choice for T tokens: ids int32 [T, K] by falling weight, weights f32 [T, K] with rows of sum 1."""

    ids: Tensor
    weights: Tensor


@dataclass(frozen=True, eq=False)
class ExpandedExpert:
    """One expert as matmul operands in F32: gate_up [2I, D] (gate rows, then up rows), down [D, I]."""

    gate_up: Tensor
    down: Tensor


class ExpertProvider(Protocol):
    """Where expert weights come from."""

    def ready(self, layer: int, expert_ids: Sequence[int]) -> Iterable[ExpandedExpert]:
        """The experts asked for, in the order asked. CheckpointError when one is damaged.

        An iterable, so that a provider may hold one at a time: 256 experts of the 35B shape expanded are 3 GiB."""


def route(logits: Tensor, top_k: int) -> Routing:
    """Softmax over all experts, the K largest, renormalised to sum to 1. logits f32 [T, E].

    Ties break by lower expert id: a stable falling sort of the logits. Logits rather than probabilities, because
    softmax may round two different logits to one probability, and then the larger logit is the router's choice.
    """
    ids = logits.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    chosen = logits.softmax(-1).gather(-1, ids)
    return Routing(ids.int(), chosen / chosen.sum(-1, keepdim=True))


@dataclass(frozen=True, eq=False)
class MoeBlock:
    """One MoE block. shared_in stacks gate_proj and up_proj of the shared expert and the one row of
    shared_expert_gate."""

    layer: int
    top_k: int
    precision: Precision
    router: Linear
    experts: ExpertProvider
    shared_in: Linear
    shared_down: Linear

    def __call__(self, x: Tensor) -> Tensor:
        """x f32 [T, D], the operand -> f32 [T, D]: routed experts + sigmoid(shared gate) * shared expert."""
        routing = route(self.router(x), self.top_k)
        outputs = self._one_token(x, routing) if x.shape[0] == 1 else self._bucketed(x, routing)
        return combine(outputs, routing.weights) + self._shared(x)

    def _one_token(self, x: Tensor, routing: Routing) -> Tensor:
        """The expert output of every rank of one token, f32 [1, K, D]: nothing to pack, and one activation for all
        ranks instead of K (a decode step of seedling's shape takes 8.2 ms instead of 9.6 ms, one thread)."""
        experts = list(self.experts.ready(self.layer, routing.ids[0].tolist()))
        hidden = self._activation(torch.cat([F.linear(x, expert.gate_up) for expert in experts]))  # [K, I]
        rows = hidden.split_with_sizes([1] * len(experts))
        outputs = [F.linear(row, expert.down) for row, expert in zip(rows, experts, strict=True)]
        return torch.cat(outputs).unsqueeze(0)

    def _bucketed(self, x: Tensor, routing: Routing) -> Tensor:
        """The expert output of every routed pair, f32 [T, K, D]. Pairs are packed by expert, so that an expert's
        weights are read once however many tokens chose it."""
        by_pair = routing.ids.flatten()  # pair p = token * K + rank
        by_expert, pairs = by_pair.sort(stable=True)
        counts = Counter(by_expert.tolist())  # active experts, by rising id, with the number of their pairs
        buckets = x[pairs // self.top_k].split_with_sizes(list(counts.values()))
        experts = self.experts.ready(self.layer, list(counts))
        outputs = [
            F.linear(self._activation(F.linear(bucket, expert.gate_up)), expert.down)
            for bucket, expert in zip(buckets, experts, strict=True)
        ]
        packed = torch.cat(outputs)
        by_rank = torch.empty_like(packed).index_copy_(0, pairs, packed)
        return by_rank.view(-1, self.top_k, x.shape[1])

    def _activation(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up, as the operand of down: f32 [n, 2I] -> f32 [n, I]."""
        gate, up = gate_up.chunk(2, dim=-1)
        return self.precision.operand(F.silu(gate) * up)

    def _shared(self, x: Tensor) -> Tensor:
        gate_up, switch = self.shared_in(x).split_with_sizes([self.shared_in.outputs - 1, 1], dim=-1)
        return switch.sigmoid() * self.shared_down(self._activation(gate_up))


def combine(outputs: Tensor, weights: Tensor) -> Tensor:
    """Sum over ranks of weights * outputs, in rank order: it does not depend on how pairs were scheduled.
    outputs f32 [T, K, D], weights f32 [T, K] -> f32 [T, D]."""
    first, *rest = zip(weights.unsqueeze(-1).unbind(1), outputs.unbind(1), strict=True)
    total = first[0] * first[1]
    for weight, output in rest:
        total.addcmul_(weight, output)
    return total
