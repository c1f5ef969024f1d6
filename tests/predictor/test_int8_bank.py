"""The torch code that a released bank carries: quantising, and scores inside what float64 allows."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

from huorn.predictor.bank_files import int8_bank
from tests.predictor.banks import (
    LARGE,
    RAGGED,
    Interval,
    Sizes,
    inputs,
    normal,
    probabilities_are_right,
    product,
    random_bank,
    whole_head,
)  # fmt: skip

ROUNDINGS = 130  # with Kp / 128: what a term of int8_bank.grouped_linear goes through at most


def test_codes_are_the_nearest() -> None:
    weight = normal(3, 33, 300).bfloat16()
    codes, scale = int8_bank.quantise(weight)
    assert (codes.shape, codes.dtype) == ((3, 33, 384), torch.int8)
    assert (scale.shape, scale.dtype) == ((3, 33, 3), torch.float32)
    assert (codes[..., 300:] == 0).all()
    groups = torch.nn.functional.pad(weight.double(), (0, 84)).view(3, 33, 3, 128)
    torch.testing.assert_close(scale.double(), groups.abs().amax(-1) / 127, rtol=2**-24, atol=0)
    away = (groups - scale.double()[..., None] * codes.double().view(groups.shape)).abs()
    assert (away <= scale.double()[..., None] / 2 * (1 + 2**-15)).all()
    assert (codes.view(3, 33, 3, 128).int().abs().amax(-1) == 127).all()


def test_halves_go_to_even_codes() -> None:
    weight = torch.zeros(1, 128)
    weight[0, :5] = torch.tensor([127.0, 0.5, 1.5, -2.5, -3.5])
    codes, scale = int8_bank.quantise(weight)
    assert scale.tolist() == [[1.0]]
    assert codes[0, :6].tolist() == [127, 0, 2, -2, -4, 0]


def test_zeros_and_the_smallest_numbers_have_scale_zero() -> None:
    weight = torch.zeros(2, 256)
    weight[1, 200] = 2.0**-127
    codes, scale = int8_bank.quantise(weight)
    assert not codes.any()
    assert not scale.any()
    weight[1, 200] = 2.0**-119  # / 127 is normal
    assert int8_bank.quantise(weight)[0][1, 200] == 127


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, 3.4e38])
def test_what_is_not_finite_is_refused(bad: float) -> None:
    weight = torch.ones(4, 130)
    weight[2, 129] = bad  # 3.4e38 rounds to infinity in BF16
    with pytest.raises(ValueError, match="NaN or infinity"):
        int8_bank.quantise(weight)


@pytest.mark.parametrize("shape", [(1, 1), (33, 200), (130, 1000), (64, 7489)], ids=str)
def test_products_lie_within_the_bound(shape: tuple[int, int]) -> None:
    codes, scale = int8_bank.quantise(normal(*shape))
    bias, x = normal(shape[0]), normal(5, shape[1]).bfloat16()
    x[:, ::30] *= 100
    tensors = {"w_in.codes": codes[None], "w_in.scale": scale[None], "b_in": bias[None]}
    together = int8_bank.grouped_linear(codes, scale, bias, x)
    assert (together.shape, together.dtype) == ((5, shape[0]), torch.bfloat16)
    for row, column in zip(together, x, strict=True):
        bound = product(tensors, 0, "in", Interval.at(column), ROUNDINGS)
        assert bound.holds(row)
        assert bound.holds(int8_bank.grouped_linear(codes, scale, bias, column))
        # and hardly any of it is left to chance: most intervals are one BF16 number
        assert (bound.low == bound.high).double().mean() >= 0.5 or shape[0] == 1


@pytest.mark.parametrize(
    "sizes", [*RAGGED, LARGE], ids=lambda s: f"F{s.features}-T{s.width}-D{s.hidden}-E{s.experts}"
)
def test_scores_lie_where_float64_puts_them(sizes: Sizes) -> None:
    tensors, (x, base) = random_bank(sizes), inputs(sizes)
    z, p = int8_bank.score(tensors, x, base)
    assert z.shape == p.shape == (sizes.heads, sizes.groups, sizes.experts)
    assert z.dtype == p.dtype == torch.float32
    for head in range(sizes.heads):
        assert whole_head(tensors, head, x[head], base[head], sizes, ROUNDINGS).holds(z[head])
    assert probabilities_are_right(tensors, z, p)


def test_a_batch_is_token_after_token_and_floats_are_rounded_first() -> None:
    sizes = Sizes()
    tensors, (x, base) = random_bank(sizes), inputs(sizes)
    xs, bases = (
        torch.stack([x.float(), 0.5 * x.float()]) * 1.001,
        torch.stack([base.double(), base.double()]) * 1.001,
    )
    z, p = int8_bank.score(tensors, xs, bases)
    assert z.shape == (2, sizes.heads, sizes.groups, sizes.experts)
    for token in range(2):
        for head in range(sizes.heads):
            rounded = xs[token, head].bfloat16(), bases[token, head].bfloat16()
            assert whole_head(tensors, head, *rounded, sizes, ROUNDINGS).holds(z[token, head])
        assert probabilities_are_right(tensors, z[token], p[token])


def test_it_needs_python_3_10_and_torch_alone() -> None:
    source = Path(int8_bank.__file__).read_text(encoding="utf-8")
    tree = ast.parse(source, feature_version=(3, 10))
    names = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    names += [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    assert {name.split(".")[0] for name in names} <= {"__future__", "collections", "torch"}
