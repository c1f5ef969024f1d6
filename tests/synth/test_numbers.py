"""The numbers: same bytes however they are asked for, near-normal, free of NaN, different for every expert."""

from __future__ import annotations

import hashlib
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from huorn.synth.numbers import CODE_STD, SHORT_POOL, SIGN_POOL, NumberSource, Values, window_start
from huorn.synth.presets import find_preset
from huorn.synth.tensors import text_tensors

CODES = Values("F8_E4M3", CODE_STD)
GAUSSIAN = Values("BF16", 0.02)
SCALES = Values("BF16", 0.001, mean=0.01)
DECAY = Values("F32", 0.5)


@pytest.fixture(scope="module")
def source() -> NumberSource:
    source = NumberSource(seed=7)
    source.prepare({CODES, GAUSSIAN, SCALES, DECAY})
    return source


def numbers(source: NumberSource, kind: Values, count: int, name: str = "w") -> np.ndarray:
    out = np.empty(count * kind.itemsize, np.uint8)
    source.fill(name, kind, 0, out)
    return out


def decoded(raw: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(raw).view(dtype).double()


@settings(deadline=None, max_examples=40)
@given(
    kind=st.sampled_from([CODES, GAUSSIAN, SCALES, DECAY]),
    cuts=st.lists(st.integers(0, 150_000), max_size=5),
)
def test_pieces_are_the_whole(source: NumberSource, kind: Values, cuts: list[int]) -> None:
    whole = numbers(source, kind, 150_000 // kind.itemsize)  # longer than a pool: it wraps
    edges = sorted({0, len(whole), *(min(cut, len(whole)) for cut in cuts)})
    pieces = np.empty_like(whole)
    for begin, end in pairwise(edges):
        source.fill("w", kind, begin, pieces[begin:end])
    assert np.array_equal(pieces, whole)


def test_element_is_the_pool_at_its_place_with_its_sign(source: NumberSource) -> None:
    """Against the definition, element by element, past the ends of both tables."""
    value_place, sign_place = window_start(7, "w")
    pool, signs = source._pools[GAUSSIAN].view("<u2"), source._signs[2].view("<u2")
    count = SIGN_POOL - sign_place % SIGN_POOL + 10
    drawn = numbers(source, GAUSSIAN, count).view("<u2")
    for i in (0, 1, SHORT_POOL - 1, SHORT_POOL, 3 * SHORT_POOL + 5, count - 11, count - 10, count - 1):
        assert drawn[i] == pool[(value_place + i) % SHORT_POOL] ^ signs[(sign_place + i) % SIGN_POOL], i


def test_codes_look_like_weights(source: NumberSource) -> None:
    raw = numbers(source, CODES, 1_000_000)
    assert not ((raw & 0x7F) == 0x7F).any()
    values = decoded(raw, torch.float8_e4m3fn)
    assert 384 <= values.abs().max() <= 448
    assert abs(values.mean()) < 1
    assert values.std().item() == pytest.approx(CODE_STD, rel=0.02)
    inside = (values.abs() < CODE_STD).double().mean()
    assert inside.item() == pytest.approx(0.683, abs=0.02)  # of a normal distribution
    assert (values < 0).double().mean().item() == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize(
    ("kind", "dtype"), [(GAUSSIAN, torch.bfloat16), (SCALES, torch.bfloat16), (DECAY, torch.float32)]
)
def test_moments(source: NumberSource, kind: Values, dtype: torch.dtype) -> None:
    values = decoded(numbers(source, kind, SHORT_POOL), dtype)
    assert values.mean().item() == pytest.approx(kind.mean, abs=0.02 * kind.std)
    assert values.std().item() == pytest.approx(kind.std, rel=0.02)


def test_same_on_every_machine() -> None:
    """Pinned: a change here changes every synthetic checkpoint that benchmarks were taken on."""
    source = NumberSource(seed=0)
    long = Values("F8_E4M3", CODE_STD, long=True)
    kinds = {"codes": CODES, "scales": SCALES, "gaussian": GAUSSIAN, "decay": DECAY, "long": long}
    source.prepare(set(kinds.values()))
    sums = {
        name: hashlib.sha256(numbers(source, kind, 100_000)).hexdigest()[:16] for name, kind in kinds.items()
    }
    assert sums == PINNED


def test_seed_and_name_decide(source: NumberSource) -> None:
    other = NumberSource(seed=8)
    other.prepare({CODES})
    first = numbers(source, CODES, 1000)
    assert not np.array_equal(first, numbers(source, CODES, 1000, name="v"))
    assert not np.array_equal(first, numbers(other, CODES, 1000))


def test_no_two_matrices_of_the_35b_shape_are_equal() -> None:
    names = [
        t.name for t in text_tensors(find_preset("qwen3.5-35b-a3b-fp8").config) if t.values.dtype == "F8_E4M3"
    ]
    assert len(names) == 30_720 + 250
    assert len({window_start(0, name) for name in names}) == len(names)


PINNED = {
    "codes": "aef8b3423ce481d3",
    "scales": "adf8d5dc69039565",
    "gaussian": "5ac84ea65d3b6cd8",
    "decay": "68d21897b737bf67",
    "long": "03c27292d5d856c2",
}
