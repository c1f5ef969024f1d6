"""Routed experts for the native kernels: a table of addresses per layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from huorn.checkpoint.reader import Checkpoint, ExpertWeights
from huorn.kernels.huge_pages import HugePages
from huorn.kernels.operand import Operand, common_format


class ExpertTable(Protocol):
    """Where the kernels find experts. `addresses(layer)` int64 [E, 6]: gate, up, down, then their scales."""

    @property
    def format(self) -> int:
        """Of every expert (huorn.kernels.operand)."""
        ...

    @property
    def resident(self) -> bool:
        """Whether every expert is always ready, so that nobody need ask."""
        ...

    def addresses(self, layer: int) -> Tensor:
        """The table of a layer; its memory never moves."""
        ...

    def ready(self, layer: int, expert_ids: Sequence[int]) -> None:
        """Sees to it that these rows of the table are valid until the next call. CheckpointError when one is damaged."""
        ...


class _Rows:
    """Tables and the operands that their rows point to."""

    def __init__(self, layers: int, experts: int, f32: bool) -> None:
        self.table = torch.zeros(layers, experts, 6, dtype=torch.int64)
        self.f32 = f32
        self.format: int | None = None  # of the first expert, and so of all
        self._alive: list[Operand] = []

    def fill(self, layer: int, expert: int, weights: ExpertWeights) -> None:
        operands = [Operand.of(weight, self.f32) for weight in (weights.gate, weights.up, weights.down)]
        self.format = common_format(operands, self.format)
        self._alive += operands
        addresses = [operand.addresses for operand in operands]
        self.table[layer, expert] = torch.tensor(
            [data for data, _ in addresses] + [scale for _, scale in addresses]
        )


class ResidentTable:
    """All experts in RAM as they are stored (expanded with f32), read once."""

    resident = True

    def __init__(self, checkpoint: Checkpoint, f32: bool, memory: HugePages) -> None:
        config = checkpoint.config
        self._rows = _Rows(config.num_hidden_layers, config.num_experts, f32)
        for layer in range(config.num_hidden_layers):
            for expert in range(config.num_experts):
                self._rows.fill(layer, expert, checkpoint.read_expert(layer, expert, memory.take))
        assert self._rows.format is not None
        self.format = self._rows.format

    def addresses(self, layer: int) -> Tensor:
        """int64 [E, 6]."""
        return self._rows.table[layer]

    def ready(self, layer: int, expert_ids: Sequence[int]) -> None:
        """They always are."""


class MappedTable:
    """Experts in the mapped files: the kernels read them as pages come in. For models larger than RAM; slow."""

    resident = False

    def __init__(self, checkpoint: Checkpoint) -> None:
        config = checkpoint.config
        self._checkpoint = checkpoint
        self._rows = _Rows(config.num_hidden_layers, config.num_experts, f32=False)
        self._known = torch.zeros(config.num_hidden_layers, config.num_experts, dtype=torch.bool)
        self.ready(0, [0])
        assert self._rows.format is not None
        self.format = self._rows.format

    def addresses(self, layer: int) -> Tensor:
        """int64 [E, 6]; rows that were never asked for are zeros."""
        return self._rows.table[layer]

    def ready(self, layer: int, expert_ids: Sequence[int]) -> None:
        """Asks for all of them first, so that the disk has a queue, then looks at those that are new."""
        wanted = [self._checkpoint.expert(layer, expert_id) for expert_id in expert_ids]
        for expert_id, weights in zip(expert_ids, wanted, strict=True):
            if self._known[layer, expert_id]:
                continue
            for weight in (weights.gate, weights.up, weights.down):
                weight.refuse_damaged()
            self._rows.fill(layer, expert_id, weights)
            self._known[layer, expert_id] = True
