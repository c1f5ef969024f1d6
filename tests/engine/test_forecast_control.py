"""When a bank is left alone, and how many copies ahead a token may start."""

from __future__ import annotations

import numpy as np
import pytest

from huorn.engine.fast_tier import Residency
from huorn.engine.forecast_control import (
    FIRST_LOOK,
    FIRST_MOST,
    FIRST_PAUSE,
    WINDOW,
    ForecastControl,
    MissCost,
    copies_in_idle_time,
)
from huorn.engine.forecasting import OFF, Forecasting
from huorn.engine.generate import Generation
from huorn.engine.sampling import SamplingSettings
from huorn.engine.session import Session
from huorn.experts.cache import ExpertCache

HEADS, EXPERTS, TOP_K = 2, 16, 2


def cache() -> ExpertCache:
    found = Session.open(None, 512, residency=Residency(slots=0.25)).cache
    assert found is not None
    return found


def right_and_wrong(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A forecast of what came, its opposite, and what came."""
    rng = np.random.default_rng(seed)
    came = np.stack([rng.permutation(EXPERTS)[:TOP_K] for _ in range(HEADS)]).astype(np.int32)
    said = np.full((HEADS, EXPERTS), 0.1, dtype=np.float32)
    np.put_along_axis(said, came.astype(np.int64), 0.9, 1)
    return said, 1 - said, came


def test_a_bank_that_names_less_than_repeating_does_is_left_alone_then_tried_again() -> None:
    control = ForecastControl(cache(), 1000)
    assert control.uses_forecasts
    last = right_and_wrong(0)[2]
    _, wrong, came = right_and_wrong(0)
    control.ended(0.0, wrong, came, came)  # repeating is right
    assert not control.uses_forecasts
    assert not control.wants_forecast
    assert not control.follows
    assert control.log == [
        f"after 1 tokens forecasts named 0 % of the experts that came, the last token's were 100 %: they are left alone for "
        f"{FIRST_PAUSE} tokens"
    ]
    for step in range(FIRST_PAUSE - FIRST_LOOK):
        control.ended(float(step), None, last, last)
    assert control.wants_forecast
    assert not control.uses_forecasts
    for step in range(FIRST_LOOK):
        said, _, came = right_and_wrong(step)
        control.ended(float(step), said, 1 - came, came)
    assert control.uses_forecasts
    assert control.log[-1].endswith("forecasts are used again")


def test_a_bank_that_is_a_little_worse_than_repeating_is_judged_after_four_forecasts() -> None:
    control = ForecastControl(cache(), 1000)
    for step in range(FIRST_LOOK):
        assert control.uses_forecasts
        said, _, came = right_and_wrong(step)
        said[0] = 1 - said[0]  # half of the heads are wrong, and repeating is right in three of four
        last = came.copy()
        last[0, 0] = (came[0] + 1).max() % EXPERTS
        control.ended(float(step), said, last, came)
    assert not control.uses_forecasts
    assert control.log[0].startswith("after 4 tokens forecasts named 50 %")


def test_a_bank_that_saves_less_than_it_costs_is_left_alone() -> None:
    control = ForecastControl(cache(), 1000)
    for step in range(WINDOW + FIRST_LOOK + 2):
        said, _, came = right_and_wrong(step)
        control.spend(0.01)
        control.ended(float(step), said, (came + 3) % EXPERTS, came)
    assert not control.uses_forecasts
    assert "forecasts saved about 0.00 ms a token and cost 10.00" in control.log[0]


def test_fixed_is_fixed() -> None:
    control = ForecastControl(cache(), 1000, fixed=5)
    for step in range(100):
        control.ended(
            float(step), right_and_wrong(step)[1], right_and_wrong(step)[2], right_and_wrong(step)[2]
        )
    assert control.most == 5
    assert control.uses_forecasts
    assert control.log == []


def test_idle_time() -> None:
    assert copies_in_idle_time(0.1, 0.0, 2e9, 10_000_000) == pytest.approx(20)
    assert copies_in_idle_time(0.1, 1.5e8, 2e9, 10_000_000) == pytest.approx(5)
    assert copies_in_idle_time(0.1, 3e8, 2e9, 10_000_000) == 0


def generate(forecasting: Forecasting, tokens: int = 200) -> tuple[str, Session]:
    session = Session.open(None, 512, residency=Residency(slots=0.25, forecasting=forecasting))
    text = "".join(
        Generation(session, [5, 9, 2, 40], SamplingSettings(0.8, seed=2), tokens, stop_ids=frozenset())
    )
    return text, session


def test_the_embedded_bank_saves_misses_and_an_inverted_one_rests_after_four_forecasts(
    tmp_path: object,
) -> None:
    """Prompt included; tests/e2e/test_replay.py has the bar for decode steps."""
    from pathlib import Path

    from benchmarks.invert_bank import invert
    from huorn.assets import EMBEDDED_BANK

    assert isinstance(tmp_path, Path)
    invert(EMBEDDED_BANK, tmp_path / "bad")
    plain, without = generate(Forecasting(OFF))
    good, helped = generate(Forecasting(fixed=24))
    bad, hindered = generate(Forecasting(str(tmp_path / "bad")))
    assert plain == good == bad
    assert without.cache is not None
    assert helped.cache is not None
    assert hindered.forecaster is not None
    assert hindered.cache is not None
    assert helped.cache.counts.misses < 0.8 * without.cache.counts.misses
    control = hindered.forecaster.control
    assert "of the experts that came" in control.log[0]
    assert int(control.log[0].split()[1]) <= FIRST_LOOK + 2
    assert hindered.cache.brought.counts.begun <= FIRST_MOST * (FIRST_LOOK + 1)
    assert hindered.cache.counts.misses < 1.3 * without.cache.counts.misses


def test_what_a_miss_costs_is_the_slope_of_times() -> None:
    rng = np.random.default_rng(3)
    cost = MissCost()
    assert cost.seconds == 0
    for _ in range(300):
        misses = float(rng.integers(5, 30))
        cost.add(misses, 0.004 + 2e-4 * misses + rng.normal(0, 1e-4))
    assert cost.seconds == pytest.approx(2e-4, rel=0.15)
    same = MissCost()
    for _ in range(300):
        same.add(7.0, 0.005 + rng.normal(0, 1e-4))
    assert same.seconds == 0  # all alike: nothing is said
