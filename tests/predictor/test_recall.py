"""recall@K and calibration against brute force."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from huorn.predictor.calibration import fit_calibration
from huorn.predictor.head import fit_router
from huorn.predictor.recall import hits_at, recall_at


def test_recall_counts_what_is_among_the_best_and_lower_ids_win_ties() -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randint(0, 6, (200, 20), generator=generator).float()  # many ties
    routed = torch.rand(200, 20, generator=generator).argsort(1)[:, :4]
    ks = (1, 4, 8, 20)
    got = hits_at(scores, routed, ks)
    for row in range(200):
        order = sorted(range(20), key=lambda expert: (-scores[row, expert].item(), expert))
        for place, k in enumerate(ks):
            want = len(set(order[:k]) & set(routed[row].tolist())) / 4
            assert got[row, place].item() == pytest.approx(want)
    assert recall_at(scores, routed, (20,)) == [1.0]


def test_calibration_is_the_best_of_a_grid() -> None:
    rng = np.random.default_rng(1)
    z = torch.from_numpy(rng.standard_normal(4000) * 3)
    used = torch.from_numpy(
        (rng.random(4000) < 1 / (1 + np.exp(-(0.6 * z.numpy() - 1.2)))).astype(np.float64)
    )
    a, b = fit_calibration(z, used)

    def loss(a: float, b: float) -> float:
        return float(torch.nn.functional.binary_cross_entropy_with_logits(a * z + b, used))

    assert (
        loss(a, b)
        <= min(loss(x, y) for x in np.arange(0.3, 0.9, 0.02) for y in np.arange(-1.6, -0.8, 0.02)) + 1e-9
    )
    assert (a, b) == (pytest.approx(0.6, abs=0.06), pytest.approx(-1.2, abs=0.12))


def test_calibration_learns_nothing_from_one_kind_of_outcome() -> None:
    assert fit_calibration(torch.randn(50), torch.zeros(50)) == (1.0, 0.0)


def test_router_fit_is_least_squares() -> None:
    rng = np.random.default_rng(2)
    hidden = rng.standard_normal((500, 12)).astype(np.float16)
    logits = (
        hidden.astype(np.float64) @ rng.standard_normal((12, 6)) + 3 + rng.standard_normal((500, 6))
    ).astype(np.float16)
    found = fit_router(torch.from_numpy(hidden), torch.from_numpy(logits))
    inputs = np.concatenate([hidden, np.ones((500, 1))], 1).astype(np.float64)
    want, *_ = np.linalg.lstsq(inputs, logits.astype(np.float64), rcond=None)
    np.testing.assert_allclose(found.weight.numpy(), want[:-1].T, atol=1e-5)
    np.testing.assert_allclose(found.bias.numpy(), want[-1], atol=1e-4)
