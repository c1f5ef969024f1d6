"""NativeScorer on every variant: each stage inside its bound, whole heads inside float64's intervals, the same bits always."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor

from huorn import _native
from huorn.kernels.isa import ALL, available
from huorn.predictor.bank_files import int8_bank
from huorn.predictor.native_scorer import NativeScorer
from tests.predictor import banks
from tests.predictor.banks import (
    LARGE,
    RAGGED,
    Interval,
    Sizes,
    inputs,
    probabilities_are_right,
    random_bank,
    whole_head,
)

ROUNDINGS = 10  # with K / 128: native/predictor_bank.h counts what a term goes through
EACH_SIZE = pytest.mark.parametrize(
    "sizes", [*RAGGED, LARGE], ids=lambda s: f"F{s.features}-T{s.width}-D{s.hidden}-E{s.experts}"
)


@pytest.fixture(scope="module", params=ALL)
def isa(request: pytest.FixtureRequest) -> str:
    if request.param not in available():
        pytest.skip(f"this CPU has no {request.param}")
    return str(request.param)


@pytest.fixture(scope="module")
def runtimes(isa: str) -> dict[int, _native.Runtime]:
    return {threads: _native.Runtime(threads, isa) for threads in (1, 2, 3)}


@EACH_SIZE
def test_each_stage_alone(runtimes: dict[int, _native.Runtime], sizes: Sizes) -> None:
    """From what the stage before handed over, so that nothing but its own sums can differ."""
    tensors, (x, base) = random_bank(sizes), inputs(sizes)
    scorer = NativeScorer(tensors, runtimes[2])
    z, p = scorer.score(x, base)
    trunk, corrections, forecast = scorer.stages(sizes.heads)
    split, known = sizes.groups * sizes.experts, 0.0
    for head in range(sizes.heads):
        u = banks.trunk(banks.product(tensors, head, "in", Interval.at(x[head]), ROUNDINGS))
        assert u.holds(trunk[head])
        o = banks.product(tensors, head, "out", Interval.at(trunk[head]), ROUNDINGS)
        d, change = (Interval(*(end[part] for end in o)) for part in (slice(split), slice(split, None)))
        assert d.holds(corrections[head])
        assert banks.forecast(change, base[head]).holds(forecast[head, : sizes.hidden])
        assert not forecast[head, sizes.hidden :].any()
        r = banks.product(tensors, head, "router", Interval.at(forecast[head]), ROUNDINGS)
        stage = banks.scores(Interval.at(corrections[head].view(sizes.groups, -1)), r)
        assert stage.holds(z[head])
        known += float((stage.low == stage.high).double().mean()) / sizes.heads
    assert probabilities_are_right(tensors, z, p)
    assert known >= 0.8  # of the scores the bound allows one number only


@EACH_SIZE
def test_whole_heads_and_the_torch_code(runtimes: dict[int, _native.Runtime], sizes: Sizes) -> None:
    """Native and torch are both inside the same intervals, so no further apart than these are wide."""
    tensors, (x, base) = random_bank(sizes), inputs(sizes)
    z, _ = NativeScorer(tensors, runtimes[2]).score(x, base)
    reference, _ = int8_bank.score(tensors, x, base)
    for head in range(sizes.heads):
        bound = whole_head(tensors, head, x[head], base[head], sizes, 130)  # more roundings than either has
        assert bound.holds(z[head])
        assert bound.holds(reference[head])


@EACH_SIZE
def test_the_same_bits_for_any_threads_and_heads(runtimes: dict[int, _native.Runtime], sizes: Sizes) -> None:
    tensors, (x, base) = random_bank(sizes), inputs(sizes)
    expected = NativeScorer(tensors, runtimes[1]).score(x, base)
    for threads, runtime in runtimes.items():
        scorer = NativeScorer(tensors, runtime)
        for _ in range(3):
            for ours, theirs in zip(scorer.score(x, base), expected, strict=True):
                assert torch.equal(ours, theirs), threads
        for first in range(sizes.heads):
            for end in range(first + 1, sizes.heads + 1):
                part = scorer.score(x[first:end], base[first:end], first)
                for ours, theirs in zip(part, expected, strict=True):
                    assert torch.equal(ours, theirs[first:end])


def test_any_dtype_and_layout(runtimes: dict[int, _native.Runtime]) -> None:
    sizes = Sizes()
    tensors, (x, base) = random_bank(sizes), inputs(sizes)
    scorer = NativeScorer(tensors, runtimes[2])
    expected = scorer.score(x, base)
    spread = torch.zeros(sizes.heads, 2 * sizes.features).double()
    spread[:, ::2] = x.double()
    room = torch.zeros(sizes.heads * sizes.hidden + 1).bfloat16()  # two bytes behind a boundary
    moved = room[1:].view(base.shape).copy_(base)
    for ours, theirs in zip(scorer.score(spread[:, ::2], moved), expected, strict=True):
        assert torch.equal(ours, theirs)
    views = {name: tensor.transpose(0, 1).contiguous().transpose(0, 1) for name, tensor in tensors.items()}
    for ours, theirs in zip(NativeScorer(views, runtimes[2]).score(x, base), expected, strict=True):
        assert torch.equal(ours, theirs)


def test_bytes_are_counted(runtimes: dict[int, _native.Runtime]) -> None:
    sizes = Sizes()
    scorer = NativeScorer(random_bank(sizes), runtimes[2])
    before = runtimes[2].counters()[0]
    scorer.score(*inputs(sizes))
    assert runtimes[2].counters()[0] - before == scorer.nbytes
    outputs = sizes.groups * sizes.experts + sizes.hidden
    assert scorer.nbytes == sizes.heads * (128 * (256 + 8) + outputs * (128 + 4) + 64 * (128 + 4))


def test_nan_stays_in_its_head(runtimes: dict[int, _native.Runtime]) -> None:
    sizes = Sizes()
    tensors, (x, base) = random_bank(sizes), inputs(sizes)
    scorer = NativeScorer(tensors, runtimes[2])
    expected, _ = scorer.score(x, base)
    x[1, 7] = torch.nan
    z, p = scorer.score(x, base)
    assert z[1].isnan().all()
    assert p[1].isnan().all()
    assert torch.equal(z[[0, 2]], expected[[0, 2]])


def test_what_does_not_fit_is_refused(runtimes: dict[int, _native.Runtime]) -> None:
    sizes = Sizes()
    tensors, (x, base) = random_bank(sizes), inputs(sizes)
    scorer = NativeScorer(tensors, runtimes[2])
    for wrong in ((x[:, :100], base), (x, base[:, 1:]), (x[:2], base), (x[0], base[0])):
        with pytest.raises(ValueError, match="must be"):
            scorer.score(*wrong)
    for first in (-1, 1):
        with pytest.raises(ValueError, match="the bank has"):
            scorer.score(x, base, first)
    assert scorer.score(x[:0], base[:0], 3)[0].shape == (0, sizes.groups, sizes.experts)
    for name, tensor in tensors.items():
        damaged: dict[str, Tensor] = {**tensors, name: tensor[..., :-1]}
        for bad in (
            damaged,
            {**tensors, name: tensor.double()},
            {k: v for k, v in tensors.items() if k != name},
        ):
            with pytest.raises(ValueError, match="must be"):
                NativeScorer(bad, runtimes[2])


_BETWEEN_GUARDS = """
import ctypes, mmap, sys
from huorn import _native
libc = ctypes.CDLL(None, use_errno=True)
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
page, keep = mmap.PAGESIZE, []
def between(nbytes, behind):  # memory that ends, or begins, at a page that may not be touched
    inside = -(-nbytes // page) * page
    room = mmap.mmap(-1, inside + 2 * page)
    base = ctypes.addressof(ctypes.c_char.from_buffer(room))
    for guard in (base, base + page + inside):
        if libc.mprotect(guard, page, 0):
            raise OSError(ctypes.get_errno(), "mprotect")
    keep.append(room)
    return base + page + (0 if behind else inside - nbytes)
runtime = _native.Runtime(2, sys.argv[1])
shapes = (1, 1, 128, 1, 1, 1), (3, 200, 128, 72, 64, 3), (2, 129, 256, 257, 33, 2)
for heads, features, width, hidden, experts, groups in shapes:
    up = lambda n: -(-n // 128) * 128
    for behind in (False, True):
        take = lambda nbytes: between(nbytes, behind)
        weight = lambda rows, cols: _native.GroupedCodes(codes=take(heads * rows * cols), scale=take(heads * rows * cols // 32),
                                                         bias=take(4 * heads * rows), rows=rows, cols=cols)
        bank = _native.PredictorBank(w_in=weight(width, up(features)), w_out=weight(groups * experts + hidden, width),
                                     w_router=weight(experts, up(hidden)), a=take(4 * heads * groups), b=take(4 * heads * groups),
                                     hidden=hidden, experts=experts, groups=groups)
        out = 4 * heads * groups * experts
        work = take(4 * heads * (width + groups * experts + up(hidden)))
        x, base = take(2 * heads * features), take(2 * heads * hidden)
        runtime.score_heads(bank, 0, heads, x, features, base, work, take(out), take(out))
print("whole")
"""


def test_nothing_outside_is_touched(isa: str) -> None:
    done = subprocess.run([sys.executable, "-c", _BETWEEN_GUARDS, isa], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "whole\n"), done.stderr
