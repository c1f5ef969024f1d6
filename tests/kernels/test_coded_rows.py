"""Bounds from INT8 codes: never violated, neither by exact products nor by those of the kernels, and as narrow as they can be."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from huorn import _native
from huorn.kernels.isa import ALL, available
from huorn.kernels.operand import BF16

SHAPES = ((1, 1), (33, 7), (130, 64), (97, 200), (300, 513), (64, 2048))


@pytest.fixture(scope="module", params=ALL)
def runtime(request: pytest.FixtureRequest) -> _native.Runtime:
    if request.param not in available():
        pytest.skip(f"this CPU has no {request.param}")
    return _native.Runtime(2, request.param)


@dataclass(frozen=True)
class Coded:
    """A weight bf16 [V, D] and its codes."""

    weight: Tensor
    codes: Tensor
    scale: Tensor
    spread: Tensor
    runtime: _native.Runtime

    @classmethod
    def of(cls, runtime: _native.Runtime, weight: Tensor) -> Coded:
        weight = weight.bfloat16().contiguous()
        rows, cols = weight.shape
        # NaN and a guard behind everything: what is not written shows
        codes = torch.full((rows * cols + 64,), 99, dtype=torch.int8)
        scale, spread = torch.full((rows,), torch.nan), torch.full((rows,), torch.nan)
        assert runtime.code_rows(
            weight.data_ptr(), rows, cols, codes.data_ptr(), scale.data_ptr(), spread.data_ptr()
        )
        assert (codes[rows * cols :] == 99).all()
        return cls(weight, codes[: rows * cols].view(rows, cols), scale, spread, runtime)

    def bounds(self, x: Tensor, norm: Tensor | None = None, largest_x: float = 1e30) -> tuple[Tensor, Tensor]:
        rows, cols = self.weight.shape
        lower, upper = torch.full((len(x), rows), torch.nan), torch.full((len(x), rows), torch.nan)
        coded = _native.CodedRows(
            codes=self.codes.data_ptr(), scale=self.scale.data_ptr(), spread=self.spread.data_ptr(), rows=rows, cols=cols,
            largest_x=largest_x,
        )  # fmt: skip
        self.runtime.bound_rows(
            coded, 0 if norm is None else norm.data_ptr(), 1e-6, x.data_ptr(), len(x), lower.data_ptr(), upper.data_ptr()
        )  # fmt: skip
        return lower, upper

    def product(self, x: Tensor, norm: Tensor | None = None) -> Tensor:
        """What the full product gives, f32."""
        rows, cols = self.weight.shape
        y = torch.empty(len(x), rows)
        matrix = _native.Matrix(self.weight.data_ptr(), 0, rows, cols, BF16)
        self.runtime.linear(
            matrix, 0 if norm is None else norm.data_ptr(), 1e-6, x.data_ptr(), len(x), len(x), y.data_ptr()
        )
        return y

    def check(self, x: Tensor) -> Tensor:
        """The bounds hold; returns upper - lower."""
        lower, upper = self.bounds(x)
        exact = x.bfloat16().double() @ self.weight.double().T
        computed = self.product(x)
        assert (lower.double() <= exact).all()
        assert (exact <= upper.double()).all()
        assert (lower <= computed).all()
        assert (computed <= upper).all()
        return (upper - lower).double()


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape) + seed))


def powers(*shape: int, low: int, high: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return 2.0 ** torch.randint(low, high, shape, generator=generator).double()


def weights_of(kind: str, rows: int, cols: int) -> Tensor:
    weight = normal(rows, cols).double()
    if kind == "scales":  # down to denormals
        weight *= powers(rows, 1, low=-140, high=55)
    elif kind == "heavy":
        weight = weight**5
    elif kind == "mixed":
        weight *= powers(rows, cols, low=-40, high=1)
    elif kind == "one-large":
        weight[:, 0] = 1000
    elif kind == "few":
        weight = weight.sign() * (weight.abs() > 1.5)
    return weight.float()


def columns_of(kind: str, count: int, cols: int) -> Tensor:
    x = normal(count, cols, seed=1).double()
    if kind == "outliers":
        x[:, :: max(1, cols // 3)] *= 3000
    elif kind == "scales":
        x *= powers(count, 1, low=-120, high=55)
    elif kind == "mixed":
        x *= powers(count, cols, low=-130, high=1)
    return x.float()


@pytest.mark.parametrize("kind", ["normal", "scales", "heavy", "mixed", "one-large", "few"])
@pytest.mark.parametrize("columns", ["normal", "outliers", "scales", "mixed"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape[0]}x{shape[1]}")
def test_bounds_hold(runtime: _native.Runtime, shape: tuple[int, int], kind: str, columns: str) -> None:
    Coded.of(runtime, weights_of(kind, *shape)).check(columns_of(columns, 6, shape[1]))


@pytest.mark.parametrize("cols", [64, 200, 2048])
def test_columns_along_the_residuals(runtime: _native.Runtime, cols: int) -> None:
    """The worst case: x parallel to what the codes leave out. There the bounds are within 5 % of what is needed."""
    coded = Coded.of(runtime, normal(64, cols))
    rest = coded.weight.double() - coded.scale.double()[:, None] * coded.codes.double()
    x = (rest / rest.norm(dim=1, keepdim=True)).float()
    width = coded.check(x).diagonal()
    score = (x.bfloat16().double() * coded.codes.double()).sum(
        1
    ) * coded.scale.double()  # what the first pass sees
    exact = (x.bfloat16().double() * coded.weight.double()).sum(1)
    assert ((exact - score) / (width / 2)).min() >= 0.95


def test_roundings_that_all_go_one_way(runtime: _native.Runtime) -> None:
    """Codes without residual; with them, what is added to each of 64 sums is just over half of its last place, and just under a
    quarter with the weights themselves: each of 16,320 additions rounds up by 0.5, or down by 0.5."""
    x = torch.full((1, 16384), 0.5 + 1 / 128)
    x[0, :64] = 2.0**24
    coded = Coded.of(runtime, torch.ones(17, 16384))
    coded.check(x)
    lower, upper = coded.bounds(x)
    away = float((lower + upper)[0, 0].double() / 2 - x.double().sum())
    assert away > 7000
    # What the spread allows for inexact codes alone, 4 u |x| |w|, is less.
    assert 4 * 2.0**-24 * float(x.double().norm()) * 128 < 4100


@pytest.mark.parametrize("cols", [64, 200, 2048])
def test_codes_are_the_nearest(runtime: _native.Runtime, cols: int) -> None:
    coded = Coded.of(runtime, normal(64, cols))
    most = coded.weight.double().abs().amax(1)
    torch.testing.assert_close(coded.scale.double(), most / 127, rtol=1e-6, atol=0)
    assert (coded.codes.int().abs().amax(1) == 127).all()
    away = coded.weight.double() / coded.scale.double()[:, None] - coded.codes.double()
    assert away.abs().max() <= 0.5 + 1e-4


def test_width_in_a_normal_case(runtime: _native.Runtime) -> None:
    """0.41 deviations of a logit at 2,048 inputs with eight bits, so few rows remain."""
    coded, x = Coded.of(runtime, normal(256, 2048)), normal(4, 2048, seed=3)
    width = coded.check(x) / 2 / math.sqrt(2048)
    assert 0.3 <= width.mean() <= 0.5


def test_zero_rows_and_columns(runtime: _native.Runtime) -> None:
    weight = normal(40, 130)
    weight[::3] = 0
    width = Coded.of(runtime, weight).check(torch.cat([torch.zeros(1, 130), normal(1, 130)]))
    assert (width[:, ::3] < 1e-30).all()
    assert (width[0] < 1e-28).all()


@pytest.mark.parametrize("cols", [1, 72, 513])
def test_several_columns_are_as_one(runtime: _native.Runtime, cols: int) -> None:
    coded, x, norm = Coded.of(runtime, normal(97, cols)), normal(11, cols, seed=2), normal(cols, seed=4)
    for count in (1, 2, 3, 4, 5, 7, 11):
        together = coded.bounds(x[:count].contiguous(), norm)
        for number in range(count):
            alone = coded.bounds(x[number : number + 1].contiguous(), norm)
            assert torch.equal(together[0][number], alone[0][0])
            assert torch.equal(together[1][number], alone[1][0])


def test_the_norm_is_that_of_the_product(runtime: _native.Runtime) -> None:
    coded, x, norm = Coded.of(runtime, normal(97, 200)), 50 * normal(5, 200, seed=2), normal(200, seed=4)
    lower, upper = coded.bounds(x, norm)
    computed = coded.product(x, norm)
    assert ((lower <= computed) & (computed <= upper)).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nothing_is_known_of_damaged_or_huge_columns(runtime: _native.Runtime, bad: float) -> None:
    coded, x = Coded.of(runtime, normal(40, 130)), normal(2, 130)
    x[1, 100] = bad
    lower, upper = coded.bounds(x)
    assert torch.isfinite(lower[0]).all()
    assert (~(lower[1] > -math.inf)).all()
    assert (~(upper[1] < math.inf)).all()
    lower, upper = coded.bounds(x, largest_x=1.0)
    assert (lower[0] == -math.inf).all()
    assert (upper[0] == math.inf).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [(0, 0), (39, 129), (20, 64)])
def test_damaged_weights_are_found(runtime: _native.Runtime, bad: float, place: tuple[int, int]) -> None:
    weight = normal(40, 130).bfloat16()
    weight[place] = bad
    codes, scale, spread = torch.empty(40, 130, dtype=torch.int8), torch.empty(40), torch.empty(40)
    arguments = weight.data_ptr(), 40, 130, codes.data_ptr(), scale.data_ptr(), spread.data_ptr()
    assert not runtime.code_rows(*arguments)
    weight[place] = torch.finfo(torch.bfloat16).max
    assert runtime.code_rows(*arguments)


def test_bytes_are_counted(runtime: _native.Runtime) -> None:
    coded = Coded.of(runtime, normal(97, 200))
    before = runtime.counters()[0]
    coded.bounds(normal(6, 200))
    assert runtime.counters()[0] - before == 97 * (200 + 8)  # once for all columns; two F32 per row


# ---- candidates ----

ENDS = st.one_of(st.integers(-6, 6).map(float), st.sampled_from([math.inf, -math.inf, math.nan, -0.0]))


@settings(max_examples=500, deadline=None)
@given(st.lists(st.tuples(ENDS, ENDS), min_size=1, max_size=70), st.integers(1, 80), st.integers(0, 80))
def test_candidates_against_brute_force(ends: list[tuple[float, float]], k: int, room: int) -> None:
    k = min(k, len(ends))
    lower = np.array([low for low, _ in ends], dtype=np.float32)
    upper = np.array([high for _, high in ends], dtype=np.float32)
    known = sorted((low for low, _ in ends if not math.isnan(low)), reverse=True)
    least = known[k - 1] if k <= len(known) else -math.inf
    want = [i for i, (_, high) in enumerate(ends) if math.isnan(high) or high >= least]
    ids = np.full(80, -1, dtype=np.int64)
    found = _native.candidates(lower.ctypes.data, upper.ctypes.data, len(ends), k, ids.ctypes.data, room)
    assert found == len(want)
    kept = min(room, len(want))
    assert ids[:kept].tolist() == want[:kept]
    assert (ids[kept:] == -1).all()
