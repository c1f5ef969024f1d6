"""Scores of a whole bank in one call: the same bits for any threads and any part of the bank, near float64, on every variant."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from huorn import _native
from huorn.kernels import isa
from huorn.predictor.bank_files.int8_bank import GROUP, grouped_linear, quantise, score
from huorn.predictor.native_scorer import NativeScorer


def made_bank(
    heads: int, features: int, trunk: int, experts: int, hidden: int, groups: int, seed: int
) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    found = {name: torch.randn(heads, groups, generator=generator) for name in ("a", "b")}
    for name, rows, cols in (
        ("in", trunk, features),
        ("out", groups * experts + hidden, trunk),
        ("router", experts, hidden),
    ):
        weight = torch.randn(heads, rows, cols, generator=generator) / cols**0.5
        found[f"w_{name}.codes"], found[f"w_{name}.scale"] = quantise(weight)
        found[f"b_{name}"] = torch.randn(heads, rows, generator=generator)
    return found


@pytest.mark.parametrize("name", isa.available())
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_threads_and_parts_change_no_bit_and_the_reference_is_near(name: str, data: st.DataObject) -> None:
    heads, groups = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 3))
    features, hidden = data.draw(st.integers(1, 400)), data.draw(st.integers(1, 300))
    experts, trunk = data.draw(st.integers(1, 70)), GROUP * data.draw(st.integers(1, 2))
    seed = data.draw(st.integers(0, 99))
    bank = made_bank(heads, features, trunk, experts, hidden, groups, seed)
    generator = torch.Generator().manual_seed(seed)
    x, base = (
        torch.randn(heads, features, generator=generator),
        torch.randn(heads, hidden, generator=generator),
    )
    scorers = [NativeScorer(bank, _native.Runtime(threads, name)) for threads in (1, 2)]
    z, p = scorers[0].score(x, base)
    for scorer in scorers:
        for _ in range(2):
            assert all(torch.equal(*pair) for pair in zip(scorer.score(x, base), (z, p), strict=True))
        first = data.draw(st.integers(0, heads - 1))
        count = data.draw(st.integers(1, heads - first))
        part = slice(first, first + count)
        assert all(
            torch.equal(*pair)
            for pair in zip(scorer.score(x[part], base[part], first), (z[part], p[part]), strict=True)
        )
    want, want_p = score(bank, x, base)
    # Products differ by 1e-6 or so; where that crosses a rounding to BF16 it becomes 1/256 of a number near 3, in each stage.
    assert float((z - want).abs().max()) < 0.1
    assert float((z - want).abs().mean()) < 0.004
    assert float((p - want_p).abs().max()) < 0.1


def test_int8_products_are_within_their_bound_of_float64() -> None:
    torch.manual_seed(0)
    for rows, cols in ((5, 1), (7, 127), (9, 128), (33, 301), (64, 2048)):
        weight, bias, x = torch.randn(rows, cols), torch.randn(rows), torch.randn(6, cols)
        codes, scale = quantise(weight)
        got = grouped_linear(codes, scale, bias, x).double()
        values = codes.double() * scale.double().repeat_interleave(GROUP, 1)
        inputs = torch.nn.functional.pad(x.bfloat16().double(), (0, codes.shape[1] - cols))
        exact = inputs @ values.T + bias
        roundings = (codes.shape[1] / GROUP + 130) * 2.0**-24
        room = roundings / (1 - roundings) * (inputs.abs() @ values.abs().T + bias.abs())
        assert bool(((got - exact).abs() <= room + (exact.abs() + room) * 2.0**-8).all())


def test_codes_are_the_nearest_and_padding_is_zero() -> None:
    torch.manual_seed(1)
    weight = torch.randn(11, 200) * torch.logspace(-6, 6, 11)[:, None]
    weight[3, :128] = 0
    codes, scale = quantise(weight)
    assert codes.shape == (11, 256)
    assert bool((codes[:, 200:] == 0).all())
    assert float(scale[3, 0]) == 0
    assert bool((codes[3, :128] == 0).all())
    for row in range(11):
        for group in range(2):
            part = weight[row, GROUP * group : GROUP * group + GROUP].bfloat16().float()
            mine = codes[row, GROUP * group : GROUP * group + len(part)].float()
            step = float(part.abs().max()) / 127
            assert float(scale[row, group]) == pytest.approx(step, rel=1e-6)
            assert float((part - mine * step).abs().max()) <= step * 0.5001
    with pytest.raises(ValueError, match="NaN or infinity"):
        quantise(torch.tensor([[float("nan")]]))


def test_what_does_not_fit_is_named() -> None:
    bank = made_bank(2, 100, 128, 8, 60, 3, 0)
    runtime = _native.Runtime(1, isa.chosen())
    for name in bank:
        with pytest.raises(ValueError, match=name.replace(".", r"\.").split("_")[0]):
            NativeScorer({one: value for one, value in bank.items() if one != name}, runtime)
    with pytest.raises(ValueError, match=r"w_in\.codes"):
        NativeScorer(bank | {"w_in.codes": bank["w_in.codes"].float()}, runtime)
    scorer = NativeScorer(bank, runtime)
    with pytest.raises(ValueError, match="must be"):
        scorer.score(torch.zeros(2, 300), torch.zeros(2, 60))
    with pytest.raises(ValueError, match="the bank has 0 to 1"):
        scorer.score(torch.zeros(2, 100), torch.zeros(2, 60), 1)


def test_every_weight_is_counted_once() -> None:
    bank = made_bank(3, 300, 256, 16, 200, 3, 0)
    runtime = _native.Runtime(2, isa.chosen())
    scorer = NativeScorer(bank, runtime)
    before = runtime.counters()[0]
    scorer.score(torch.zeros(3, 300), torch.zeros(3, 200))
    assert runtime.counters()[0] - before == scorer.nbytes
