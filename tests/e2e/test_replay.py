"""huorn replay from the command line: published counts, forecasts of the embedded bank, mistakes in one sentence."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from tests.trace.traces import RECORDED

from .command_line import Caller, assert_one_sentence, huorn


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    at = tmp_path_factory.mktemp("traces")
    words = [
        "def",
        "class",
        "return",
        "for",
        "if",
        "import",
        "while",
        "in",
        "self",
        "None",
        "True",
        "print",
        "list",
        "dict",
        "open",
        "read",
    ]
    rng = random.Random(1)
    lines = [json.dumps({"text": " ".join(rng.choices(words, k=70))}) + "\n" for _ in range(12)]
    (at / "p.jsonl").write_text("".join(lines))
    done = huorn(
        "trace",
        "record",
        "--mode",
        "teacher",
        "--prompts",
        at / "p.jsonl",
        "--out",
        at / "t",
        "--tokens",
        "60",
    )
    assert done.code == 0, done.stderr
    return at / "t"


def test_published_counts(tmp_path: Path, call: Caller) -> None:
    path = RECORDED / "qwen.route.csv"
    if not path.exists():
        pytest.skip("../shared/traces is not there")
    done = call(
        "replay", path, "--memory", "2000MiB,4000MiB", "--policy", "lru,belady", "--json", tmp_path / "r.json"
    )
    assert done.code == 0, done.stderr
    found = json.loads((tmp_path / "r.json").read_text())["results"]
    for policy, size, everything, decode in (
        ("lru", "2000MiB", 52.7, 56.5), ("lru", "4000MiB", 74.9, 80.3), ("belady", "2000MiB", 74.0, 79.4),
        ("belady", "4000MiB", 86.5, 92.7),
    ):  # fmt: skip
        one = found[policy][size]
        assert round(100 * one["hit_rate_all"], 1) == everything
        assert round(100 * one["hit_rate_decode"], 1) == decode
        assert one["loads"] == one["demand_misses"]
        assert one["bytes_read"] > 2_000_000 * one["loads"]


def test_forecasts_of_the_embedded_bank(traces: Path, tmp_path: Path, call: Caller) -> None:
    done = call(
        "replay", traces, "--slots", "0.25", "--split", "train,test", "--policy", "lru,belady,forecast,forecast-retention",
        "--json", tmp_path / "r.json", "--plot", tmp_path / "r.png",
    )  # fmt: skip
    assert done.code == 0, done.stderr
    assert "loads)" in done.stdout
    assert (tmp_path / "r.png").read_bytes()[:4] == b"\x89PNG"
    found = {
        name: sizes["0.25"]
        for name, sizes in json.loads((tmp_path / "r.json").read_text())["results"].items()
    }
    assert found["forecast"]["demand_misses"] < 0.55 * found["lru"]["demand_misses"]
    assert found["forecast"]["demand_misses"] < found["belady"]["demand_misses"]
    assert found["forecast"]["loads"] < 1.1 * found["lru"]["loads"]
    assert (
        found["belady"]["demand_misses"]
        < found["forecast-retention"]["demand_misses"]
        < found["lru"]["demand_misses"]
    )


def test_bad_use(traces: Path, tmp_path: Path, call: Caller) -> None:
    for arguments, words in (
        ((traces,), "give one of --memory"), ((traces, "--slots", "0.2", "--memory", "1GiB"), "give one of --memory"),
        ((traces, "--memory", "1GiB"), "give --slots"), ((traces, "--slots", "0.2,x"), "--slots 'x'"),
        ((traces, "--slots", "nan"), "--slots 'nan'"), ((traces, "--slots", "0.2", "--policy", "lru,mru"), "'mru'"),
        ((traces, "--slots", "0.2", "--split", "all"), "--split all"),
        ((traces, "--slots", "0.2", "--prompts", "0"), "--prompts is 0"),
        ((traces, "--slots", "0.2", "--prefetch", "-1"), "--prefetch"),
        ((traces, "--slots", "0.2", "--threshold", "nan"), "--threshold"),
        ((traces, "--slots", "0.0005", "--policy", "lru"), "no room"),
        ((tmp_path / "x", "--slots", "0.2"), "can not be replayed"),
        ((tmp_path, "--slots", "0.2"), "is not a trace"), ((traces, "--slots", "0.2", "--bank", tmp_path), str(tmp_path)),
    ):  # fmt: skip
        policy = () if "--policy" in arguments or "--bank" not in arguments else ("--policy", "forecast")
        assert_one_sentence(call("replay", *arguments, *policy), words)
