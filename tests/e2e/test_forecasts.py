"""Forecasts as a user meets them: the same text, said what they did, mistakes in one sentence."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from huorn.assets import EMBEDDED_BANK, EMBEDDED_MODEL

from .command_line import Result, assert_one_sentence, huorn

PROMPT = "def quicksort(items):"


def run(*options: str | Path) -> Result:
    return huorn("run", "-", "--max-tokens", "256", "--context", "512", *options, stdin=PROMPT.encode())


@pytest.fixture(scope="module")
def text() -> str:
    result = run("--predictor", "off")
    assert result.code == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize(
    "options",
    [
        ["--slots", "0.25"],
        ["--slots", "0.25", "--prefetch", "0"],
        ["--slots", "0.25", "--policy", "lfu", "--prefetch", "card"],
        ["--slots", "0.25", "--policy", "layer-lru", "--prefetch", "8,1"],
        ["--slots", "0.25", "--predictor", "off", "--lookahead"],
        ["--slots", "0.1", "--lookahead", "--threads", "1"],
        ["--slots", "8", "--lookahead"],
        ["--slots", "0.5", "--predictor", str(EMBEDDED_BANK)],
    ],
    ids=" ".join,
)
def test_256_tokens_are_those_without(text: str, options: list[str]) -> None:
    result = run(*options)
    assert result.code == 0, result.stderr
    assert result.stdout == text


def test_what_they_did_is_said_and_written(tmp_path: Path) -> None:
    out = tmp_path / "run.json"
    result = run("--slots", "0.25", "--json", out)
    assert "expert predictor" in result.stderr  # a line of the budget
    assert "experts were in one of 128 slots" in result.stderr
    assert "copies ahead" in result.stderr
    slots = json.loads(out.read_text())["slots"]
    assert slots["hits"] + slots["late_hits"] + slots["misses"] == slots["lookups"]
    assert slots["copies_ahead"] >= slots["copies_ahead_used"] > 0
    assert slots["forecast_s"] > 0
    without = run("--slots", "0.25", "--predictor", "off", "--json", out)
    assert "forecasts" not in without.stderr
    assert json.loads(out.read_text())["slots"]["copies_ahead"] == 0
    everything = run("--json", out)
    assert "slots" not in everything.stderr
    assert "slots" not in json.loads(out.read_text())


@pytest.mark.parametrize("slots", [150, 300])
def test_memory_is_kept_with_a_bank(slots: int, tmp_path: Path) -> None:
    out = tmp_path / "run.json"
    assert huorn("plan", "--slots", str(slots), "--context", "512", "--json", out).code == 0
    limit = json.loads(out.read_text())["resident_bytes"]
    result = run("--memory", str(limit), "--json", out)
    assert result.code == 0, result.stderr
    assert "expert predictor" in result.stderr
    assert json.loads(out.read_text())["peak_rss_bytes"] <= limit


def test_the_bank_beside_a_model_is_used_and_another_models_is_not(tmp_path: Path, text: str) -> None:
    model = tmp_path / "m"
    shutil.copytree(EMBEDDED_MODEL, model)
    assert "copies ahead" not in run("--model", model, "--slots", "0.25").stderr
    shutil.copytree(EMBEDDED_BANK, tmp_path / "m_bank")
    beside = run("--model", model, "--slots", "0.25")
    assert "copies ahead" in beside.stderr
    assert beside.stdout == text
    config = tmp_path / "m_bank" / "config.json"
    config.write_text(config.read_text().replace('"fingerprint": "7', '"fingerprint": "8'))
    other = run("--model", model, "--slots", "0.25")
    assert other.code == 0
    assert "no forecasts: " in other.stderr
    assert "same shapes, other weights" in other.stderr
    assert other.stdout == text
    assert_one_sentence(
        run("--model", model, "--slots", "0.25", "--predictor", tmp_path / "m_bank"),
        "can not serve this model",
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            ["--predictor", "nowhere"],
            "--predictor nowhere is no folder: give that of a bank, or auto, or off",
        ),
        (["--predictor", str(EMBEDDED_MODEL)], "is damaged or of another kind"),
        (["--prefetch", "-1"], "--prefetch '-1' must be a number of copies per layer and token"),
        (["--policy", "forecast", "--predictor", "off"], "--policy forecast needs a bank of this model"),
        (["--policy", "mru"], "there is no cache policy 'mru'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes(options: list[str], words: str) -> None:
    assert_one_sentence(run("--slots", "0.25", *options), words)


def test_the_demo_shows_the_same_text_three_times() -> None:
    done = huorn("demo", env={"COLUMNS": "120"})
    assert done.code == 0, done.stderr
    lines = done.stdout.splitlines()
    rows = [line for line in lines if "a quarter" in line or "all in RAM" in line]
    assert len(rows) == 3
    assert "100.0 %" in rows[2]
    shares = [float(row.split("%")[0].split()[-1]) for row in rows]
    assert shares[0] > shares[1] < shares[2]
