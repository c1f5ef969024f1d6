"""Each step of sampling against a brute-force F64 oracle in numpy, written from the order in sampling.py's docstring."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from huorn.engine.sampling import Sampler, SamplingSettings, keep_top_k, keep_top_p
from huorn.errors import HuornError, UsageError


def oracle_distribution(
    logits: Sequence[float], s: SamplingSettings, prompt: Sequence[int], generated: Sequence[int]
) -> np.ndarray:
    """Probabilities [V] f64 of the next token, one id at a time, nothing clever."""
    scores = np.array(logits, dtype=np.float64)
    for i in range(len(scores)):
        if i in prompt or i in generated:
            scores[i] = (
                scores[i] / s.repetition_penalty if scores[i] > 0 else scores[i] * s.repetition_penalty
            )
        count = list(generated).count(i)
        if count:
            scores[i] -= s.presence_penalty + s.frequency_penalty * count
    by_rank = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
    if s.temperature == 0:
        return np.eye(len(scores))[by_rank[0]]
    scores = (scores - scores.max()) / s.temperature
    if s.top_k:
        by_rank = by_rank[: s.top_k]
    weights = {i: math.exp(scores[i]) for i in by_rank}
    total, nucleus, mass = sum(weights.values()), [], 0.0
    for i in by_rank:
        if s.top_p < 1 and mass >= s.top_p * total * (1 - 1e-12):
            break
        nucleus.append(i)
        mass += weights[i]
    best = max(weights.values())
    kept = [i for i in nucleus if weights[i] >= s.min_p * best]
    probabilities = np.zeros(len(scores))
    for i in kept:
        probabilities[i] = weights[i] / sum(weights[j] for j in kept)
    return probabilities


def oracle_pick(probabilities: np.ndarray, uniform: float) -> int:
    return int(np.searchsorted(np.cumsum(probabilities), uniform, side="right"))


# Quarters: sums of their exponentials do not land on a nucleus edge by rounding alone, and ties are frequent.
LOGITS = st.lists(st.integers(-40, 40).map(lambda n: n / 4), min_size=1, max_size=40)
SETTINGS = st.builds(
    SamplingSettings,
    temperature=st.sampled_from([0.0, 0.3, 0.7, 1.0, 2.5]),
    top_k=st.sampled_from([0, 1, 2, 5, 39, 100]),
    top_p=st.sampled_from([0.01, 0.31, 0.77, 0.93, 1.0]),
    min_p=st.sampled_from([0.0, 0.013, 0.21, 1.0]),
    repetition_penalty=st.sampled_from([0.5, 1.0, 1.3]),
    presence_penalty=st.sampled_from([-0.7, 0.0, 0.4]),
    frequency_penalty=st.sampled_from([-0.3, 0.0, 0.9]),
    seed=st.integers(0, 2**64),
)


@settings(max_examples=200, deadline=None)
@given(LOGITS, SETTINGS, st.lists(st.integers(0, 50)))
def test_whole_order_against_oracle(logits: list[float], s: SamplingSettings, prompt: list[int]) -> None:
    prompt = [i for i in prompt if i < len(logits)]
    sampler, uniforms = Sampler(s, prompt), random.Random(s.seed)
    generated: list[int] = []
    for _ in range(6):
        got = sampler.pick(torch.tensor(logits))
        probabilities = oracle_distribution(logits, s, prompt, generated)
        want = oracle_pick(probabilities, 0.0 if s.temperature == 0 else uniforms.random())
        assert got == want, (probabilities[got], probabilities[want])
        generated.append(got)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(-5, 5), min_size=1, max_size=60), st.integers(0, 70))
def test_top_k_keeps_the_largest_and_lower_ids_in_ties(scores: list[int], k: int) -> None:
    kept = keep_top_k(torch.tensor(scores, dtype=torch.float64), k).tolist()
    by_rank = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
    assert kept == sorted(by_rank[:k] if k else by_rank)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=60).filter(any), st.integers(1, 1000))
def test_top_p_is_the_shortest_run_that_reaches_p(weights: list[int], thousandths: int) -> None:
    """Whole weights and an exact fraction: no rounding in the oracle; p is nudged down so that an exact hit reaches."""
    p = min(1.0, thousandths / 1000 - 1e-9)
    kept = keep_top_p(torch.tensor(weights, dtype=torch.float64), p).tolist()
    by_rank = sorted(range(len(weights)), key=lambda i: (-weights[i], i))
    reached = [sum(weights[i] for i in by_rank[:n]) >= p * sum(weights) for n in range(1, len(weights) + 1)]
    assert kept == sorted(by_rank[: reached.index(True) + 1])


def test_top_p_that_is_reached_exactly() -> None:
    assert keep_top_p(torch.tensor([1.0, 2.0, 1.0], dtype=torch.float64), 0.5).tolist() == [1]
    assert keep_top_p(torch.tensor([1.0, 2.0, 1.0], dtype=torch.float64), 0.75).tolist() == [0, 1]


@pytest.mark.parametrize(("uniform", "picked"), [(0.0, 1), (0.4999, 1), (0.5, 3), (1.0, 3)])
def test_the_uniform_number_at_the_edges(uniform: float, picked: int) -> None:
    """Two equal ids between impossible ones; 1.0 stands for a product that rounds up to the whole sum."""
    sampler = Sampler(SamplingSettings(temperature=1.0), [])
    sampler._random.random = lambda: uniform  # type: ignore[method-assign]
    assert sampler.pick(torch.tensor([-math.inf, 0.0, -math.inf, 0.0, -math.inf])) == picked


def test_top_p_over_a_large_vocabulary() -> None:
    """The pre-filter that avoids a full sort must not change the nucleus."""
    weights = torch.exp(
        3 * torch.randn(248_320, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    )
    order = np.argsort(-weights.numpy(), kind="stable")
    share = np.cumsum(weights.numpy()[order]) / weights.sum().item()
    for p in (0.5, 0.95, 0.999):
        count = int(np.searchsorted(share, p)) + 1
        assert keep_top_p(weights, p).tolist() == sorted(order[:count].tolist())


@pytest.mark.parametrize(
    ("name", "kept"),
    [("top_k", {1, 3}), ("top_p", {1, 3}), ("min_p", {1, 3, 0})],
)
def test_each_limit_alone(name: str, kept: set[int]) -> None:
    """Probabilities of ids 0 to 4: 0.15, 0.4, 0.05, 0.3, 0.1."""
    logits = torch.tensor([0.15, 0.4, 0.05, 0.3, 0.1]).log()
    value = {"top_k": 2, "top_p": 0.69, "min_p": 0.3}[name]
    picks = {
        Sampler(SamplingSettings(temperature=1.0, seed=s, **{name: value}), []).pick(logits)
        for s in range(300)
    }
    assert picks == kept


def test_frequencies_follow_the_probabilities() -> None:
    probabilities = torch.tensor([0.5, 0.25, 0.125, 0.125])
    sampler = Sampler(SamplingSettings(temperature=1.0, seed=3), [])
    counts = np.bincount([sampler.pick(probabilities.log()) for _ in range(4000)], minlength=4) / 4000
    np.testing.assert_allclose(
        counts, probabilities.numpy(), atol=0.03
    )  # 4 standard deviations are 0.032 at p = 0.5


def test_greedy_takes_the_lowest_of_equal_ids() -> None:
    assert Sampler(SamplingSettings(), []).pick(torch.tensor([1.0, 3.0, 3.0, 3.0])) == 1
    assert Sampler(SamplingSettings(), []).pick(torch.zeros(1000)) == 0


def test_equal_logits_are_drawn_evenly_and_top_k_takes_the_low_ids() -> None:
    draws = {Sampler(SamplingSettings(temperature=1.0, seed=s), []).pick(torch.zeros(8)) for s in range(200)}
    assert draws == set(range(8))
    limited = SamplingSettings(temperature=1.0, top_k=3)
    assert {Sampler(limited, []).pick(torch.zeros(8)) for _ in range(100)} == {0, 1, 2}


def test_minus_infinity_is_never_picked() -> None:
    logits = torch.tensor([-math.inf, 0.0, -math.inf, 0.0, -math.inf])
    for limits in (
        {},
        {"top_k": 4},
        {"top_p": 0.999},
        {"top_k": 100},
        {"min_p": 0.01},
        {"repetition_penalty": 1.5},
    ):
        picks = {
            Sampler(SamplingSettings(temperature=5.0, seed=s, **limits), [0, 1]).pick(logits)
            for s in range(60)
        }
        assert picks == {1, 3}


def test_tiny_and_huge_temperatures() -> None:
    logits = torch.tensor([10.0, 11.0, -300.0])
    assert {Sampler(SamplingSettings(temperature=5e-324, seed=s), []).pick(logits) for s in range(50)} == {1}
    assert {Sampler(SamplingSettings(temperature=1e308, seed=s), []).pick(logits) for s in range(50)} == {
        0,
        1,
        2,
    }


@pytest.mark.parametrize("repetition", [1e-6, 1e6])
@pytest.mark.parametrize("penalty", [-1e6, 1e6])
@pytest.mark.parametrize("temperature", [0.0, 1e-300, 1e300])
def test_the_largest_penalties_leave_numbers(repetition: float, penalty: float, temperature: float) -> None:
    extreme = SamplingSettings(
        temperature, repetition_penalty=repetition, presence_penalty=penalty, frequency_penalty=penalty
    )
    largest = torch.finfo(torch.float32).max
    sampler = Sampler(extreme, [0, 1])
    assert {sampler.pick(torch.tensor([largest, -largest, 0.0])) for _ in range(50)} <= {0, 1, 2}


@pytest.mark.parametrize("bad", [[math.nan, 1.0], [math.inf, 1.0], [-math.inf, -math.inf]])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_damaged_logits_are_an_error(bad: list[float], temperature: float) -> None:
    with pytest.raises(HuornError, match="largest logit"):
        Sampler(SamplingSettings(temperature=temperature), []).pick(torch.tensor(bad))


def test_pick_leaves_the_logits_alone() -> None:
    logits = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    Sampler(SamplingSettings(temperature=0.5, repetition_penalty=2.0), [0, 1, 2]).pick(logits)
    assert logits.tolist() == [1.0, 2.0, 3.0]


def test_same_seed_same_picks() -> None:
    logits = torch.randn(50, 1000, generator=torch.Generator().manual_seed(0))

    def picks(seed: int) -> list[int]:
        sampler = Sampler(SamplingSettings(temperature=1.0, seed=seed), [])
        return [sampler.pick(row) for row in logits]

    assert picks(7) == picks(7)
    assert picks(7) != picks(8)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", math.nan), ("temperature", -0.1), ("temperature", math.inf),
        ("top_k", -1),
        ("top_p", 0.0), ("top_p", 1.01), ("top_p", math.nan), ("top_p", -1.0),
        ("min_p", -0.1), ("min_p", 1.1), ("min_p", math.nan),
        ("repetition_penalty", 0.0), ("repetition_penalty", -1.0), ("repetition_penalty", math.nan),
        ("repetition_penalty", 1e-308), ("repetition_penalty", 1e308), ("presence_penalty", -1e308),
        ("presence_penalty", 1.1e6), ("frequency_penalty", -1.1e6), ("frequency_penalty", 1e308),
        ("presence_penalty", math.inf), ("frequency_penalty", math.nan),
        ("seed", -1),
    ],
)  # fmt: skip
def test_settings_outside_their_range_are_named(name: str, value: float) -> None:
    with pytest.raises(UsageError, match=f"^--{name.replace('_', '-')} is .* must be "):
        SamplingSettings(**{name: value})
