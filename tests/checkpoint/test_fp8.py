"""FP8 blocks: bit-equal expansion, NaN codes, and quantisation against a brute-force search."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from huorn.checkpoint.fp8 import expand_fp8, quantize_fp8, refuse_damaged_fp8, scale_shape
from huorn.checkpoint.weight import Weight
from huorn.errors import CheckpointError

from .folders import dequantized

FINITE = [code for code in range(256) if code & 0x7F != 0x7F]


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype == torch.float32 and torch.equal(a.view(torch.int32), b.view(torch.int32))


def value_of(code: int) -> float:
    """E4M3 by its definition: sign, 4 exponent bits with bias 7, 3 mantissa bits."""
    sign, exponent, mantissa = code >> 7, code >> 3 & 15, code & 7
    magnitude = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -magnitude if sign else magnitude


def test_every_finite_code_expands_to_its_value() -> None:
    assert len(FINITE) == 254
    codes = torch.tensor([FINITE], dtype=torch.uint8)
    expanded = expand_fp8(codes, torch.ones(1, 2))
    assert same_bits(expanded, torch.tensor([[value_of(code) for code in FINITE]]))


@pytest.mark.parametrize("scale", [1.0, -3.7, 0.0, 1e-45, 1.1754942e-38, 7.3e-5, 2.0**118, 0.1])
def test_every_finite_code_times_any_scale_is_the_f32_product(scale: float) -> None:
    codes = torch.tensor([FINITE], dtype=torch.uint8).view(torch.float8_e4m3fn)
    scales = torch.full((1, 2), scale)
    assert same_bits(expand_fp8(codes, scales), dequantized(codes, scales))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(rows=st.integers(1, 400), columns=st.integers(1, 400), bf16=st.booleans(), seed=st.integers(0, 2**31))
def test_expansion_is_bit_equal_on_ragged_edges(rows: int, columns: int, bf16: bool, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    picks = torch.randint(0, len(FINITE), (rows, columns), generator=generator)
    codes = torch.tensor(FINITE, dtype=torch.uint8)[picks].view(torch.float8_e4m3fn)
    scales = torch.rand(scale_shape((rows, columns)), generator=generator) * 0.01 + 1e-6
    scales = scales.bfloat16() if bf16 else scales
    expected = dequantized(codes, scales)
    assert same_bits(expand_fp8(codes, scales), expected)
    assert same_bits(Weight(codes, scales).expand(), expected)


def test_a_stack_of_matrices_expands_like_each_alone() -> None:
    generator = torch.Generator().manual_seed(3)
    codes = torch.randint(0, 127, (2, 3, 130, 257), dtype=torch.uint8, generator=generator)
    scales = torch.rand(2, 3, 2, 3, generator=generator)
    stack = expand_fp8(codes, scales)
    assert stack.shape == codes.shape
    for i in range(2):
        for j in range(3):
            alone = dequantized(codes[i, j].view(torch.float8_e4m3fn), scales[i, j])
            assert same_bits(stack[i, j], alone)


def test_a_view_with_strides_expands_like_its_copy() -> None:
    codes = torch.randint(0, 127, (300, 200), dtype=torch.uint8, generator=torch.Generator().manual_seed(4))
    part = codes[10:290, 5:150]
    scales = torch.rand(scale_shape(tuple(part.shape)), generator=torch.Generator().manual_seed(5))
    assert same_bits(expand_fp8(part, scales), expand_fp8(part.contiguous(), scales))


@pytest.mark.parametrize("code", [0x7F, 0xFF])
@pytest.mark.parametrize("place", [(0, 0), (129, 64), (199, 299)])
def test_nan_codes_are_refused_by_name(code: int, place: tuple[int, int]) -> None:
    codes = torch.zeros(200, 300, dtype=torch.uint8)
    codes[place] = code
    weight = Weight(codes.view(torch.float8_e4m3fn), torch.ones(2, 3), name="shard-7: layers.3.x_proj")
    with pytest.raises(CheckpointError, match=r"shard-7: layers\.3\.x_proj holds the NaN code"):
        weight.expand()


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), float("-inf"), 2.0**119])
def test_scales_that_are_no_numbers_are_refused(scale: float) -> None:
    scales = torch.ones(1, 2)
    scales[0, 1] = scale
    with pytest.raises(CheckpointError, match=r"some\.weight has a block scale"):
        refuse_damaged_fp8(torch.zeros(4, 200, dtype=torch.uint8), scales, "some.weight")


def test_negative_scales_are_refused_and_zeros_are_not() -> None:
    codes = torch.zeros(4, 200, dtype=torch.uint8)
    refuse_damaged_fp8(codes, torch.tensor([[0.0, -0.0]]), "some.weight")
    with pytest.raises(CheckpointError, match=r"some\.weight has a negative block scale \(-0\.5\)"):
        refuse_damaged_fp8(codes, torch.tensor([[1.0, -0.5]], dtype=torch.bfloat16), "some.weight")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dense_weights_must_be_finite(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    Weight(torch.full((300, 3), largest, dtype=dtype)).refuse_damaged()  # their sum is infinite
    Weight(torch.empty(0, 3, dtype=dtype)).refuse_damaged()
    for bad in (float("nan"), float("inf"), float("-inf")):
        data = torch.full((300, 3), -largest, dtype=dtype)
        data[299, 1] = bad
        with pytest.raises(CheckpointError, match=r"shard-7: norm holds NaN or infinity"):
            Weight(data, name="shard-7: norm").refuse_damaged()


def test_codes_and_scales_come_together_and_fit() -> None:
    codes = torch.zeros(130, 10).to(torch.float8_e4m3fn)
    with pytest.raises(CheckpointError, match="together or not at all"):
        Weight(codes)
    with pytest.raises(CheckpointError, match="together or not at all"):
        Weight(codes.float(), torch.ones(2, 1))
    with pytest.raises(CheckpointError, match="do not fit"):
        Weight(codes, torch.ones(1, 2))
    assert Weight(codes, torch.ones(2, 1)).nbytes == 1300 + 8
    assert Weight(codes, torch.ones(2, 1)).shape == (130, 10)


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 1), (130, 3), (5, 300)])
def test_quantisation_picks_the_nearest_code(shape: tuple[int, int], scale_dtype: torch.dtype) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(6)) * 0.03
    codes, scale = quantize_fp8(weight, scale_dtype)
    assert codes.dtype == torch.float8_e4m3fn
    assert scale.dtype == scale_dtype
    assert scale.shape == scale_shape(shape)
    table = torch.tensor([value_of(code) for code in FINITE], dtype=torch.float64)
    for row in range(shape[0]):
        scales = scale.double()[row // 128][torch.arange(shape[1]) // 128]
        distances = (weight[row].double()[:, None] - table[None, :] * scales[:, None]).abs()
        chosen = (weight[row].double() - codes[row].double() * scales).abs()
        # one F32 rounding of weight / scale may turn a tie, so half an F32 step of slack
        assert bool((chosen <= distances.amin(dim=1) * (1 + 1e-6) + 1e-9).all())


def test_the_largest_weight_of_a_block_gets_the_largest_code() -> None:
    weight = torch.full((128, 256), 0.5)
    weight[3, 7], weight[5, 200] = -2.0, 8.0
    codes, scale = quantize_fp8(weight)
    assert codes[3, 7].item() == -448
    assert codes[5, 200].item() == 448
    assert torch.equal(scale, torch.tensor([[2.0, 8.0]]) / 448)


def test_a_block_of_zeros_stays_zero() -> None:
    codes, scale = quantize_fp8(torch.zeros(130, 130))
    assert torch.equal(expand_fp8(codes, scale), torch.zeros(130, 130))


def test_quantising_what_was_expanded_changes_nothing() -> None:
    weight = torch.randn(200, 300, generator=torch.Generator().manual_seed(8))
    codes, scale = quantize_fp8(weight)
    again, scale_again = quantize_fp8(expand_fp8(codes, scale))
    assert torch.equal(again.view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(scale_again, scale)


# 8.8e-43 / 448 is 1.4 of the smallest F32 and rounds to 1, so that the code would be 627; 1e-44 / 448 is zero
@pytest.mark.parametrize("size", [1e-38, 8.8e-43, 1e-44, 1e30])
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16])
def test_weights_of_extreme_size_quantise_to_finite_codes(size: float, scale_dtype: torch.dtype) -> None:
    weight = torch.tensor([[size, 0.0, -size]])
    codes, scale = quantize_fp8(weight, scale_dtype)
    refuse_damaged_fp8(codes, scale, "weight")
    assert bool(((expand_fp8(codes, scale) - weight).abs() <= weight.abs()).all())
