"""Routed experts for the native kernels: a table of addresses per layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
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
    def quick(self) -> bool:
        """Whether an expert is in RAM whenever its row is not zeros, so that a few tokens may go through layers unasked."""
        ...

    @property
    def resident(self) -> bool:
        """Whether every expert is always in RAM."""
        ...

    @property
    def looks_ahead(self) -> bool:
        """Whether `waves` wants to know what the next layer may choose."""
        ...

    def addresses(self, layer: int) -> Tensor:
        """The table of a layer; its memory never moves. Zeros: not ready."""
        ...

    def used(self, layer: int, ids: NDArray[np.int32]) -> None:
        """Told after a layer call on ids i32 [T, K] that went without `waves`, in the order of calls."""
        ...

    def waves(
        self, layer: int, ids: NDArray[np.int32], said: NDArray[np.int32] | None = None
    ) -> Iterator[list[int]]:
        """Groups of the experts in ids i32 [T, K], each group's rows valid until the next is asked for, all of them in the end;
        the first group may be empty. `said` i32 [T, K] is what the next layer's router makes of this layer's input, where that
        was asked for. CheckpointError when an expert is damaged or can not be read."""
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

    quick = True
    resident = True
    looks_ahead = False

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

    def used(self, layer: int, ids: NDArray[np.int32]) -> None:
        """Nothing to learn."""

    def waves(
        self, layer: int, ids: NDArray[np.int32], said: NDArray[np.int32] | None = None
    ) -> Iterator[list[int]]:
        """One group: all."""
        yield np.unique(ids).tolist()


MappedAdvice = Literal["plain", "random", "ahead", "huge"]


class MappedTable:
    """Experts in the mapped files: the kernels read them as pages come in. Slow: what slots are compared with.

    `advice` is what the kernel is told: nothing ("plain"), that any page may be next ("random"), that and to read each routed
    expert now ("ahead"), or that any page may be next and to use large ones ("huge").
    """

    quick = False  # a row says nothing about whether its pages are in RAM
    resident = False
    looks_ahead = False

    def __init__(self, checkpoint: Checkpoint, advice: MappedAdvice = "ahead") -> None:
        config = checkpoint.config
        self._checkpoint = checkpoint
        self._ahead = advice == "ahead"
        checkpoint.advise("random" if advice == "ahead" else advice)
        self._rows = _Rows(config.num_hidden_layers, config.num_experts, f32=False)
        self._known = torch.zeros(config.num_hidden_layers, config.num_experts, dtype=torch.bool)
        self._ask(0, [0])
        assert self._rows.format is not None
        self.format = self._rows.format

    def addresses(self, layer: int) -> Tensor:
        """int64 [E, 6]; rows that were never asked for are zeros."""
        return self._rows.table[layer]

    def used(self, layer: int, ids: NDArray[np.int32]) -> None:
        """Nothing to learn."""

    def waves(
        self, layer: int, ids: NDArray[np.int32], said: NDArray[np.int32] | None = None
    ) -> Iterator[list[int]]:
        """One group: all."""
        active = np.unique(ids).tolist()
        self._ask(layer, active)
        yield active

    def _ask(self, layer: int, expert_ids: Sequence[int]) -> None:
        """With "ahead" asks for all of them first, so that the disk has a queue, then looks at those that are new."""
        if self._ahead:
            for expert_id in expert_ids:
                self._checkpoint.read_ahead(layer, expert_id)
        for expert_id in expert_ids:
            if self._known[layer, expert_id]:
                continue
            weights = self._checkpoint.expert(layer, expert_id)
            for weight in (weights.gate, weights.up, weights.down):
                weight.refuse_damaged()
            self._rows.fill(layer, expert_id, weights)
            self._known[layer, expert_id] = True
