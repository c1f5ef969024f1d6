"""Experts straight from a checkpoint: expanded on use, or all expanded once."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import torch

from huorn.checkpoint.reader import Checkpoint, ExpertWeights
from huorn.model.moe import ExpandedExpert
from huorn.model.precision import Precision

AHEAD = 8  # experts whose bytes the kernel is asked to read while an earlier one is expanded: 25 MB in the 35B shape


class MappedExperts:
    """Reads an expert from the mapped file and expands it each time it is asked for; holds none."""

    def __init__(self, checkpoint: Checkpoint, precision: Precision) -> None:
        self.checkpoint = checkpoint
        self.precision = precision

    def ready(self, layer: int, expert_ids: Sequence[int]) -> Iterator[ExpandedExpert]:
        """One expanded expert at a time, in the order asked. CheckpointError when its weights are damaged."""
        coming = deque[ExpertWeights]()
        for expert_id in expert_ids:
            self.checkpoint.read_ahead(layer, expert_id)
            coming.append(self.checkpoint.expert(layer, expert_id))
            if len(coming) > AHEAD:
                yield self._expand(coming.popleft())
        while coming:
            yield self._expand(coming.popleft())

    def _expand(self, weights: ExpertWeights) -> ExpandedExpert:
        gate, up, down = (self.precision.matrix(w) for w in (weights.gate, weights.up, weights.down))
        return ExpandedExpert(torch.cat((gate, up)), down)


class ResidentExperts:
    """All experts of the model expanded in RAM, for models as small as seedling (100 MiB)."""

    def __init__(self, source: MappedExperts, layers: int, experts: int) -> None:
        self.by_layer = [_stacked(source, layer, experts) for layer in range(layers)]

    def ready(self, layer: int, expert_ids: Sequence[int]) -> list[ExpandedExpert]:
        """The experts asked for, in the order asked."""
        experts = self.by_layer[layer]
        return [experts[expert_id] for expert_id in expert_ids]


def _stacked(source: MappedExperts, layer: int, experts: int) -> list[ExpandedExpert]:
    """All experts of a layer as views of two tensors: decode reads them 20 % faster than from 2 x 64 allocations."""
    all_experts = list(source.ready(layer, range(experts)))
    gate_up = torch.stack([expert.gate_up for expert in all_experts])
    down = torch.stack([expert.down for expert in all_experts])
    return [ExpandedExpert(*matrices) for matrices in zip(gate_up.unbind(), down.unbind(), strict=True)]
