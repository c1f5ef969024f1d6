"""Experts in slots as a user meets them: the same text in less memory, a budget that is kept, mistakes in one sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from huorn.assets import EMBEDDED_MODEL

from .command_line import Caller, Result, huorn

PROMPT = "def quicksort(items):"


def run(*options: str | Path, prompt: str = PROMPT) -> Result:
    return huorn("run", "-", "--max-tokens", "256", "--context", "512", *options, stdin=prompt.encode())


@pytest.fixture(scope="module")
def resident_text() -> str:
    result = run()
    assert result.code == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize(
    "options",
    [
        ["--slots", "8"],
        ["--slots", "0.25"],
        ["--slots", "0.25", "--policy", "lru", "--threads", "1"],
        ["--slots", "0.5", "--policy", "layer-lfu"],
    ],
    ids=" ".join,
)
def test_256_tokens_are_those_of_all_experts_in_ram(resident_text: str, options: list[str]) -> None:
    result = run(*options)
    assert result.code == 0, result.stderr
    assert result.stdout == resident_text


def test_the_budget_is_shown_and_warns_of_too_few_slots() -> None:
    shown = run("--slots", "8", "--max-tokens", "1").stderr
    assert "8 slots for 512 experts" in shown
    assert "resident in all" in shown
    assert "8 slots are fewer than the 64 experts that one token uses" in shown
    assert "slots for" not in run("--max-tokens", "1").stderr  # everything fits: nothing to say


@pytest.mark.parametrize("slots", [40, 128, 300])
def test_memory_is_a_promise(slots: int, tmp_path: Path) -> None:
    """Peak resident memory, huge pages included, with 2,000 tokens of prompt, in about as much as these slots take."""
    out = tmp_path / "run.json"
    planned = huorn("plan", "--slots", str(slots), "--context", "2100", "--json", out)
    assert planned.code == 0, planned.stderr
    limit = json.loads(out.read_text())["resident_bytes"]
    prompt = (Path(__file__).read_text() * 3)[:5000]
    result = huorn(
        "run", "-", "--memory", str(limit), "--max-tokens", "4", "--context", "2100", "--json", out, stdin=prompt.encode()
    )  # fmt: skip
    assert result.code == 0, result.stderr
    assert "slots for 512 experts" in result.stderr
    saved = json.loads(out.read_text())
    assert saved["prompt_tokens"] > 1000
    assert saved["peak_rss_bytes"] <= limit


def test_what_a_model_needs_is_said(tmp_path: Path) -> None:
    result = run("--memory", "100MiB")
    assert result.code == 2
    assert "this model needs at least" in result.stderr
    assert "104.9 MB are allowed" in result.stderr
    assert not result.stdout


def test_a_warm_start(tmp_path: Path, resident_text: str) -> None:
    warm, out = tmp_path / "warm.json", tmp_path / "bench.json"
    assert run("--slots", "0.25", "--warm", warm).stdout == resident_text
    assert warm.exists()
    again = run("--slots", "0.25", "--warm", warm)
    assert again.stdout == resident_text
    bench = huorn(
        "bench", "decode", "--slots", "0.25", "--warm", warm, "--repeats", "1", "--no-yardstick", "--prompt-tokens", "8",
        "--max-tokens", "16", "--json", out,
    )  # fmt: skip
    assert bench.code == 0, bench.stderr
    saved = json.loads(out.read_text())
    assert 0 < saved["hit_rate"] < 1
    assert saved["disk_bytes_per_token"] > 0
    assert saved["demand_wait_s_per_token"] > 0
    warm.write_text("{}")
    refused = run("--slots", "0.25", "--warm", warm)
    assert refused.code == 2
    assert "warm.json is damaged or no warm start file" in refused.stderr


def test_a_warm_start_without_slots_says_that_it_does_nothing(tmp_path: Path) -> None:
    result = run("--warm", tmp_path / "warm.json", "--max-tokens", "1")
    assert result.code == 0
    assert "--warm has nothing to do: no experts are in slots" in result.stderr
    assert not (tmp_path / "warm.json").exists()


def test_plan(tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    result = huorn("plan", "--slots", "0.25", "--json", out)
    assert result.code == 0, result.stderr
    assert "128 slots for 512 experts" in result.stdout
    assert "tok/s" in result.stdout
    saved = json.loads(out.read_text())
    assert (saved["slots"], saved["experts"]) == (128, 512)
    assert saved["resident_bytes"] == sum(line["bytes"] for line in saved["lines"] if line["resident"])
    assert saved["estimate"]["tok_s"] > 0


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--memory", "-1"], "--memory is '-1', but it must be a size such as 12GiB"),
        (["--memory", "12 apples"], "it must be a size such as 12GiB"),
        (["--memory", "9999GiB"], "give no more than that"),
        (["--slots", "0"], "--slots is 0, but it must be a share of all experts up to 1"),
        (["--slots", "-0.5"], "--slots is -0.5"),
        (["--slots", "7"], "a number of them from 8 to 512"),
        (["--slots", "8.5"], "--slots is 8.5"),
        (["--slots", "nan"], "--slots is nan"),
        (["--slots", "513"], "--slots is 513"),
        (["--slots", "0.5", "--memory", "1GiB"], "give one of them"),
        (["--slots", "0.5", "--policy", "fifo"], "there is no cache policy 'fifo'; there are"),
        (["--policy", "fifo"], "there is no cache policy 'fifo'"),
        (["--slots", "0.5", "--precision", "f32"], "use bf16"),
        (["--slots", "0.5", "--backend", "reference"], "use --backend cpu"),
        (["--slots", "0.5", "--warm", "/nowhere/at/all"], "--warm /nowhere/at/all can not be written"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_mistakes_are_one_sentence(
    options: list[str], sentence: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    result = Caller(monkeypatch, capsys)("run", PROMPT, "--model", EMBEDDED_MODEL, *options)
    assert result.code == 2
    assert sentence in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert not result.stdout
