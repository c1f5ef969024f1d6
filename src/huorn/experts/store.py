"""The slow tier: where every routed expert lies in the checkpoint's files as downloaded, and how it will lie in a slot."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from huorn.checkpoint.fp8 import scale_damage
from huorn.checkpoint.names import F8
from huorn.checkpoint.reader import Checkpoint, StoredPart
from huorn.errors import CheckpointError, UsageError
from huorn.kernels.operand import BF16
from huorn.kernels.operand import F8 as F8_FORMAT

PAGE = 4096  # direct reads start and end on multiples of it, in the file and in memory
_FORMATS = {F8: F8_FORMAT, "BF16": BF16}


class Run(NamedTuple):
    """Bytes [offset, offset + nbytes) of a file, and where in a slot the first of them goes: offset % PAGE == place % PAGE."""

    file: int
    offset: int
    nbytes: int
    place: int


@dataclass(frozen=True, eq=False)
class ExpertStore:
    """Every routed expert of a checkpoint by key = layer * experts + expert.

    `runs[key]` is what to read, and `parts` i64 [keys, 3] where gate, up and down then lie in the slot. Matrices that are
    neighbours in a file are one run: in the releases all three are, since tensors of one dtype are sorted by name. An expert has
    slack of less than a page on both sides of a run, for aligned reads.
    """

    checkpoint: Checkpoint
    files: tuple[Path, ...]
    runs: tuple[tuple[Run, ...], ...]
    parts: NDArray[np.int64]
    format: int  # of every expert (huorn.kernels.operand)
    slot_bytes: int  # a multiple of PAGE
    part_bytes: tuple[int, int, int]

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> ExpertStore:
        """Plans all copies from the headers. Nothing is read.

        Raises CheckpointError when experts are not all stored in one dtype, UsageError when that one can not be read straight
        into a slot.
        """
        config = checkpoint.config
        files: dict[Path, int] = {}
        runs: list[tuple[Run, ...]] = []
        count = config.num_hidden_layers * config.num_experts
        places, slot_bytes = np.zeros((count, 3), dtype=np.int64), 0
        first = checkpoint.expert_parts(0, 0)
        for key in range(count):
            parts = checkpoint.expert_parts(*divmod(key, config.num_experts))
            _check_dtype(parts, first[0])
            own, ends = _runs(parts, files, places[key])
            runs.append(own)
            slot_bytes = max(slot_bytes, ends)
        gate, up, down = (part.nbytes for part in first)
        return cls(
            checkpoint,
            tuple(files),
            tuple(runs),
            places,
            _FORMATS[first[0].dtype],
            slot_bytes,
            (gate, up, down),
        )

    def name(self, key: int) -> str:
        """For errors."""
        layer, expert = divmod(key, self.checkpoint.config.num_experts)
        return f"expert {expert} of layer {layer}"

    @cached_property
    def scales(self) -> tuple[Tensor, tuple[int, int, int]] | None:
        """Block scales of all experts, read at once and kept (384 bytes for 3 MB of codes): f32 [keys, n] and how many of each
        row belong to gate, up and down. None where experts are not F8. CheckpointError when one is damaged."""
        return _scales(self.checkpoint, len(self.runs)) if self.format == F8_FORMAT else None

    def addresses(self, key: int, slot: int) -> list[int]:
        """Row of the kernels' table for an expert in the slot at this address: gate, up, down, then their scales."""
        row = [slot + place for place in self.parts[key].tolist()]
        if self.scales is None:
            return [*row, 0, 0, 0]
        table, (gate, up, _) = self.scales
        scale = table.data_ptr() + 4 * key * table.shape[1]
        return [*row, scale, scale + 4 * gate, scale + 4 * (gate + up)]


def _check_dtype(parts: tuple[StoredPart, ...], first: StoredPart) -> None:
    for part in parts:
        if part.dtype != first.dtype:
            raise CheckpointError(
                f"{part.file}: {part.name} is stored as {part.dtype} and {first.name} as {first.dtype}; experts in slots must "
                "all be of one dtype: run without --memory and --slots"
            )
    if first.dtype not in _FORMATS:
        raise UsageError(
            f"{first.name} is stored as {first.dtype}; slots hold experts in {' or '.join(_FORMATS)}: run without --memory and "
            "--slots"
        )


def _runs(
    parts: tuple[StoredPart, ...], files: dict[Path, int], places: NDArray[np.int64]
) -> tuple[tuple[Run, ...], int]:
    """The runs of one expert and the bytes of slot they take; fills `places` of its parts."""
    runs: list[Run] = []
    room = 0  # end of the last run, rounded up to a page
    for part in sorted(range(3), key=lambda index: (str(parts[index].file), parts[index].start)):
        _, _, path, start, nbytes = parts[part]
        file = files.setdefault(path, len(files))
        if runs and runs[-1].file == file and runs[-1].offset + runs[-1].nbytes == start:
            last = runs[-1]
            runs[-1] = last._replace(nbytes=last.nbytes + nbytes)
            places[part] = last.place + last.nbytes
        else:
            places[part] = room + start % PAGE
            runs.append(Run(file, start, nbytes, room + start % PAGE))
        room = -(-(runs[-1].place + runs[-1].nbytes) // PAGE) * PAGE
    return tuple(runs), room


def _scales(checkpoint: Checkpoint, count: int) -> tuple[Tensor, tuple[int, int, int]]:
    """f32 [keys, n] and how many of each row belong to gate, up and down."""
    experts = checkpoint.config.num_experts
    first = checkpoint.expert_scales(0, 0)
    gate, up, down = (scale.numel() for scale in first)
    table = torch.empty(count, gate + up + down)
    for key in range(count):
        torch.cat(
            [s.float().flatten() for s in checkpoint.expert_scales(*divmod(key, experts))], out=table[key]
        )
    if scale_damage(table) is not None:
        for key in range(count):
            layer, expert = divmod(key, experts)
            damage = scale_damage(table[key])
            if damage is not None:
                part = checkpoint.expert_parts(layer, expert)[0]
                raise CheckpointError(
                    f"{part.file}: expert {expert} of layer {layer} has {damage}; the file is damaged"
                )
    return table, (gate, up, down)
