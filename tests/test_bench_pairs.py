"""Matched pairs: order, prompts, gate, statistics; and the whole command on the embedded model."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median

import numpy as np
import pytest

from huorn.assets import EMBEDDED_MODEL
from huorn.bench.arms import ARMS, ArmResult, ArmRun, uses_bank
from huorn.bench.pairs import NOISE, Comparison, Pair, gate, interval, run_pairs
from huorn.bench.pairs_report import limit_ratio, markdown
from huorn.bench.run_log import RunLog
from huorn.errors import HuornError, UsageError
from tests.e2e.command_line import assert_one_sentence, huorn

PROMPTS = Path(__file__).parents[1] / "benchmarks" / "prompts.jsonl"


def run(arm: str) -> ArmRun:
    return ArmRun(arm=arm, model=Path("m"), prompts=(), max_tokens=4, context=64)


def result(
    tok_s: float, ids: tuple[tuple[int, ...], ...] = (), peak: int = 1000, cached: int = 0
) -> ArmResult:
    return ArmResult(
        ids=ids, tok_s=tok_s, token_s=1 / tok_s, hit_rate=0.5, late_rate=0.0, misses=1.0, disk_bytes=100.0, wait_s=0.0,
        kernel_s=0.5 / tok_s, predictor_s=0.0, prefetched=0.0, prefetched_used=0.0, slots=8, peak_bytes=peak,
        cached_bytes=cached, disk_bytes_s=1000.0,
    )  # fmt: skip


class Engine:
    """Writes down what it is asked to run."""

    def __init__(self, **speeds: float) -> None:
        self.speeds, self.asked = speeds, list[tuple[str, tuple[str, ...]]]()

    def __call__(self, one: ArmRun) -> ArmResult:
        self.asked.append((one.arm, one.prompts))
        ids = tuple(tuple(map(ord, prompt)) for prompt in one.prompts)
        return result(self.speeds.get(one.arm.partition("+")[2] or "engine", 1.0), ids)


def test_pairs_are_back_to_back_in_turns_and_take_every_prompt() -> None:
    engine, prompts = Engine(engine=10.0, both=12.0), ["a", "b", "c", "d", "e"]
    found = run_pairs(
        [run("engine"), run("engine+both")], 3, prompts, engine, lambda *_: None, lambda *_: None
    )
    assert [comparison.arm for comparison in found] == ["engine+both", NOISE]
    assert [arm for arm, _ in engine.asked] == [
        "engine", "engine+both", "engine", "engine", "engine+both", "engine", "engine", "engine", "engine", "engine+both",
        "engine", "engine",
    ]  # fmt: skip
    assert [some for _, some in engine.asked[::4]] == [("a", "d"), ("b", "e"), ("c",)]
    assert engine.asked[0][1] == engine.asked[1][1]
    both, noise = (comparison.summary() for comparison in found)
    assert both["gain"] == pytest.approx(0.2)
    assert both["wins"] == 3
    assert noise["gain"] == 0


def test_a_void_pair_is_run_again_and_never_counts() -> None:
    seen = []

    def judge(first: ArmResult, second: ArmResult, arm: str) -> str | None:
        seen.append(arm)
        return "no" if len(seen) in (1, 3, 4, 5) else None

    found = run_pairs([run("engine")], 2, ["a"], Engine(), judge, lambda *_: None)
    assert len(seen) == 5  # the first pair twice, the second three times in vain
    assert [pair.void for pair in found[0].pairs] == ["no", None, "no", "no", "no"]
    assert found[0].summary()["pairs"] == 1
    assert found[0].summary()["void"] == 4


def test_one_differing_token_ends_it() -> None:
    def execute(one: ArmRun) -> ArmResult:
        return result(1.0, ((1, 2, 3 if one.arm == "engine" else 4),))

    with pytest.raises(
        HuornError,
        match=r"arm engine\+both gave token 4 where 3 was given before, 2 tokens behind the prompt 'a'",
    ):
        run_pairs([run("engine"), run("engine+both")], 1, ["a"], execute, lambda *_: None, lambda *_: None)


def test_an_interrupted_benchmark_goes_on(tmp_path: Path) -> None:
    arms, prompts, whole = [run("engine"), run("engine+both")], ["a", "b"], Engine(engine=10.0, both=12.0)
    want = run_pairs(arms, 2, prompts, whole, lambda *_: None, lambda *_: None)

    class Interrupted(Engine):
        def __call__(self, one: ArmRun) -> ArmResult:
            if len(self.asked) == 3:
                raise KeyboardInterrupt
            return super().__call__(one)

    first, second = Interrupted(engine=10.0, both=12.0), Engine(engine=10.0, both=12.0)
    log = RunLog(tmp_path / "runs.jsonl")
    with pytest.raises(KeyboardInterrupt):
        run_pairs(arms, 2, prompts, lambda one: log.get(one, first), lambda *_: None, lambda *_: None)
    with (tmp_path / "runs.jsonl").open("a") as file:
        file.write('{"run": {"arm"')  # killed while it wrote
    log = RunLog(tmp_path / "runs.jsonl")
    found = run_pairs(arms, 2, prompts, lambda one: log.get(one, second), lambda *_: None, lambda *_: None)
    assert found == want
    assert [*first.asked, *second.asked] == whole.asked
    with pytest.raises(UsageError, match="holds runs of another command"):
        RunLog(tmp_path / "runs.jsonl").get(run("plain"), second)
    (tmp_path / "runs.jsonl").write_text("[]\n")
    with pytest.raises(UsageError, match="is damaged"):
        RunLog(tmp_path / "runs.jsonl")


def test_the_gate() -> None:
    assert gate(result(1, peak=1000), result(1, peak=1010), 10_000, True) is None
    assert "peak memory 1,000 and 1,011" in str(
        gate(result(1, peak=1000), result(1, peak=1011), 10_000, True)
    )
    assert gate(result(1, peak=1000), result(1, peak=2000), 10_000, False) is None
    assert gate(result(1), result(1, cached=100), 10_000, True) is None
    assert "in the page cache" in str(gate(result(1), result(1, cached=101), 10_000, True))


def test_the_interval_covers_what_it_should() -> None:
    """Of 300 samples with a median of 0.05 about 95 % must have it inside."""
    rng = np.random.default_rng(1)
    inside = 0
    for _ in range(300):
        low, high = interval(rng.normal(0.05, 0.02, 9).tolist())
        inside += low <= 0.05 <= high
    assert 0.9 <= inside / 300 <= 0.995
    assert interval([0.1]) == (0.1, 0.1)


def test_the_page_says_what_was_measured() -> None:
    pairs = [Pair(n, result(10.0), result(tok_s), None) for n, tok_s in enumerate((11.0, 12.0, 13.0))]
    void = Pair(3, result(10.0), result(99.0), "peak memory")
    page = markdown("model", "huorn bench pairs", "engine", [Comparison("engine+both", [*pairs, void])])
    assert "| engine+both | 3 (1 void) | +20.0 % | +10.0 to +30.0 % | 3 |" in page
    assert "99" not in page
    assert limit_ratio(result(10.0)) == pytest.approx(
        1.0
    )  # 0.1 s a token, 100 bytes from a disk of 1,000 a second


def test_arms() -> None:
    assert {arm for arm in ARMS if uses_bank(arm)} == {
        "engine+prefetch",
        "engine+retention",
        "engine+both",
        "engine+all",
    }
    assert not run("plain").residency.overlap
    assert run("mmap").residency.mapped == "plain"
    assert run("engine+prefetch").residency.policy == "lfu"
    assert run("engine+retention").residency.forecasting.caps == "0"
    assert run("engine+lookahead").residency.forecasting.lookahead
    assert run("engine").residency.forecasting.predictor == "off"


def test_the_prompts_of_the_benchmark_are_ten_or_more() -> None:
    lines = [json.loads(line)["prompt"] for line in PROMPTS.read_text().splitlines()]
    assert len(set(lines)) >= 10


def test_the_command_writes_page_numbers_and_picture(tmp_path: Path) -> None:
    out = tmp_path / "pairs"
    done = huorn(
        "bench", "pairs", "--arms", "engine,plain,engine+all", "--pairs", "1", "--slots", "0.25", "--predictor-slots", "5",
        "--link", "400MB", "--max-tokens", "12", "--prompts", PROMPTS, "--out", out,
    )  # fmt: skip
    assert done.code == 0, done.stderr
    saved = json.loads((out / "pairs.json").read_text())
    assert {row["arm"] for row in saved["comparisons"]} == {"plain", "engine+all", NOISE}
    for pair in saved["pairs"]:
        assert pair["base"]["tok_s"] > 0
        assert pair["gain"] == pytest.approx(pair["other"]["tok_s"] / pair["base"]["tok_s"] - 1)
    slots = {pair["arm"]: pair["other"]["slots"] for pair in saved["pairs"]}
    assert slots == {"plain": 128, "engine+all": 123, NOISE: 128}
    assert saved["arms"]["engine"]["misses"] > 0
    gains = [pair["gain"] for pair in saved["pairs"] if pair["arm"] == "plain" and pair["void"] is None]
    said = next(row for row in saved["comparisons"] if row["arm"] == "plain")
    assert not gains or said["gain"] == pytest.approx(median(gains))
    assert "The tokens of every prompt were equal in all arms." in done.stdout
    assert (out / "pairs.md").read_text().strip() in done.stdout.strip()
    assert not (out / "runs.jsonl").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--arms", "engine,fast"], "--arms 'fast' is not known"),
        (["--arms", "engine,engine"], "names one twice"),
        (["--pairs", "0"], "--pairs is 0"),
        (["--max-tokens", "1"], "--max-tokens is 1"),
        (["--memory", "1GiB"], "give one of --memory and --slots"),
        (["--slots", "8"], "the bank takes as much memory as"),
        (["--prompts", "nowhere"], "--prompts nowhere can not be read"),
        (["--prompts", str(EMBEDDED_MODEL / "config.json")], "can not be read as JSON lines"),
        (["--predictor", "nowhere"], "--predictor nowhere is no folder"),
        (["--prefetch", "many"], "--prefetch 'many' must be a number"),
        (["--link", "fast"], "--link"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes(options: list[str], words: str, tmp_path: Path) -> None:
    given = {"--prompts": str(PROMPTS), "--out": str(tmp_path / "o"), "--slots": "0.5"}
    given |= dict(zip(options[::2], options[1::2], strict=True))
    done = huorn("bench", "pairs", *[part for pair in given.items() for part in pair])
    assert_one_sentence(done, words)
    assert not (tmp_path / "o").exists()
