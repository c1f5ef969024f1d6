"""FP8 weights with one scale per 128 x 128 block, as in the official release (E4M3 without infinities)."""

from __future__ import annotations

from math import inf

import torch
from torch import Tensor

from huorn import _native
from huorn.errors import CheckpointError

BLOCK = 128
F8_MAX = 448.0
_SCALE_LIMIT = 2.0**119  # 2^8 times this still is an F32; no real scale comes near
_ROWS_AT_ONCE = 64  # a quarter MiB of F16 at 2,048 columns: stays in L2


def scale_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the scales of a weight [..., O, I]: [..., ceil(O / 128), ceil(I / 128)]."""
    *lead, rows, columns = shape
    return (*lead, -(-rows // BLOCK), -(-columns // BLOCK))


def refuse_damaged_fp8(codes: Tensor, scale_inv: Tensor, name: str) -> None:
    """Raises CheckpointError when `codes` holds 0x7F or 0xFF (NaN), or `scale_inv` a value outside 0 to 2^119.

    The look at the codes is native: torch needs a temporary, and those of 6,000 experts left 6 GB of holes in the heap.
    """
    codes = codes.contiguous()
    if _native.has_nan_code(codes.data_ptr(), codes.numel()):
        raise CheckpointError(f"{name} holds the NaN code of FP8 (0x7F or 0xFF); the file is damaged")
    damage = scale_damage(scale_inv)
    if damage is not None:
        raise CheckpointError(f"{name} has {damage}; the file is damaged")


def scale_damage(scale_inv: Tensor) -> str | None:
    """What is wrong with block scales (F32 or BF16, any shape), as "a ..."; None where all are from 0 to below 2^119."""
    if not scale_inv.numel():
        return None
    smallest, largest = (float(bound) for bound in scale_inv.aminmax())  # both are NaN where any scale is
    if not largest < _SCALE_LIMIT or smallest == -inf:
        return "a block scale that is not a finite number"
    return f"a negative block scale ({smallest:g})" if smallest < 0 else None


def expand_fp8(codes: Tensor, scale_inv: Tensor) -> Tensor:
    """f32 [..., O, I]: codes [..., O, I] (F8 or uint8) times scale_inv [..., ceil(O/128), ceil(I/128)].

    Bit-equal to `codes.float() * scale_inv.float()` with each scale repeated over its block, for every input
    that `refuse_damaged_fp8` lets pass (NaN codes would come out as +-480 times the scale).

    E4M3 moved 7 bits up is the F16 of 2^-8 times its value, subnormals included, and F16 to F32 is one
    instruction; the 2^8 goes into the scale, which is exact. One thread, 512 x 2048: 1.2 G weights/s, against
    1.0 for a 256-entry table, 0.7 for a table of code pairs and 0.23 for torch's own conversion.
    """
    *_, rows, columns = codes.shape
    small = codes.view(torch.int8).reshape(-1, rows, columns)
    scales = (scale_inv.float() * 256.0).reshape(-1, *scale_inv.shape[-2:])
    out = torch.empty(small.shape)
    for matrix, matrix_scales, matrix_out in zip(small, scales, out, strict=True):
        row_scales = matrix_scales.repeat_interleave(BLOCK, dim=1)[:, :columns]
        for top in range(0, rows, _ROWS_AT_ONCE):
            part = matrix_out[top : top + _ROWS_AT_ONCE]
            bits = matrix[top : top + _ROWS_AT_ONCE].to(torch.int16).mul_(128)
            part.copy_(bits.bitwise_and_(~0x4000).view(torch.float16))  # bit 14: copy of the sign, extended
            part.mul_(row_scales[top // BLOCK])
    return out.view(codes.shape)


def quantize_fp8(weight: Tensor, scale_dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """weight [O, I] -> codes float8_e4m3fn [O, I], scale_inv [ceil(O/128), ceil(I/128)] = block amax / 448.

    A block of zeros, or of values so small that its scale rounds to zero, gets scale 1. Codes are rounded to
    nearest even against the scale as stored, and clamped to +-448, which matters only where a subnormal scale was
    rounded down: torch 2.13 converts values over 448 to 448, but does not promise it.
    """
    rows, columns = weight.shape
    block_rows, block_columns = scale_shape((rows, columns))
    padded = torch.zeros(block_rows * BLOCK, block_columns * BLOCK)
    padded[:rows, :columns] = weight.float()
    blocks = padded.view(block_rows, BLOCK, block_columns, BLOCK)
    amax = blocks.abs().amax(dim=(1, 3))
    scale = (amax / F8_MAX).to(scale_dtype)
    scale[scale == 0] = 1
    scaled = (blocks / scale.float()[:, None, :, None]).clamp_(-F8_MAX, F8_MAX)
    codes = scaled.view_as(padded)[:rows, :columns].to(torch.float8_e4m3fn).contiguous()
    return codes, scale
