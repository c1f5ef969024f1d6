"""Weights as the native kernels take them: an address, a shape and a format, with the tensors kept alive."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from huorn import _native
from huorn.checkpoint.weight import Weight
from huorn.errors import CheckpointError

F8, BF16, F32 = 0, 1, 2  # enum Format in native/shapes.h
_FORMATS = {torch.float8_e4m3fn: F8, torch.bfloat16: BF16, torch.float32: F32}


@dataclass(frozen=True, eq=False)
class Operand:
    """One weight [O, I] for the kernels; scale f32 [ceil(O/128), ceil(I/128)] for F8 and only then."""

    data: Tensor
    scale: Tensor | None
    name: str  # where it comes from, for errors

    @classmethod
    def of(cls, weight: Weight, f32: bool) -> Operand:
        """The weight as it is stored, F32 rounded to BF16; with f32 everything expanded to F32 instead.

        A scale is F32 whatever it is stored in: BF16 to F32 is exact.
        """
        if f32:
            return cls(weight.expand(), None, weight.name)
        data = weight.data.bfloat16() if weight.data.dtype == torch.float32 else weight.data
        scale = None if weight.scale_inv is None else weight.scale_inv.float().contiguous()
        return cls(data, scale, weight.name)

    @property
    def format(self) -> int:
        """Of enum Format."""
        return _FORMATS[self.data.dtype]

    @property
    def addresses(self) -> tuple[int, int]:
        """(data, scale), 0 for no scale."""
        return self.data.data_ptr(), 0 if self.scale is None else self.scale.data_ptr()

    def matrix(self) -> _native.Matrix:
        """For a kernel call; valid as long as this operand is."""
        rows, cols = self.data.shape
        return _native.Matrix(*self.addresses, rows, cols, self.format)


def common_format(operands: Sequence[Operand], wanted: int | None = None) -> int:
    """The format of weights that one kernel call takes together; CheckpointError, naming the first that is stored otherwise than
    `wanted` (by default as the first of them)."""
    wanted = operands[0].format if wanted is None else wanted
    for operand in operands:
        if operand.format != wanted:
            names = {code: str(dtype).removeprefix("torch.") for dtype, code in _FORMATS.items()}
            raise CheckpointError(
                f"{operand.name} is stored as {names[operand.format]} and others of its kind as {names[wanted]}; the native "
                "kernels take experts of one dtype: use --backend reference"
            )
    return wanted
