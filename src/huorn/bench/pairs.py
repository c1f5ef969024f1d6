"""Matched pairs: two arms back to back on the same prompts, in alternating order, and what the pairs say together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median

import numpy as np

from huorn.bench.arms import ArmResult, ArmRun
from huorn.errors import HuornError

NOISE = "noise"  # the first arm against itself
GATE = 0.01  # of peak memory, and of the model's bytes in the page cache at the start
RESAMPLES = 10_000
RETRIES = 2  # times that a voided pair is run again


@dataclass(frozen=True)
class Pair:
    """One matched run: `number` chose prompts and order; `void` says why it does not count."""

    number: int
    base: ArmResult
    other: ArmResult
    void: str | None

    @property
    def gain(self) -> float:
        """How much faster the other arm was: 0.1 is a tenth more tokens per second."""
        return self.other.tok_s / self.base.tok_s - 1


@dataclass
class Comparison:
    """One arm against the first."""

    arm: str
    pairs: list[Pair] = field(default_factory=list)

    @property
    def counted(self) -> list[Pair]:
        """Pairs that passed the gate."""
        return [pair for pair in self.pairs if pair.void is None]

    def summary(self) -> dict[str, float | int | str]:
        """Median gain, its bootstrap 95 % interval, wins, and how many pairs count or are void."""
        gains = [pair.gain for pair in self.counted]
        if not gains:
            return {"arm": self.arm, "pairs": 0, "void": len(self.pairs)}
        low, high = interval(gains)
        return {
            "arm": self.arm, "pairs": len(gains), "void": len(self.pairs) - len(gains), "gain": median(gains), "low": low,
            "high": high, "wins": sum(gain > 0 for gain in gains),
        }  # fmt: skip


def interval(gains: Sequence[float]) -> tuple[float, float]:
    """95 % percentile bootstrap interval of the median (Efron 1979), 10,000 resamples with a fixed seed."""
    values, generator = np.array(gains), np.random.default_rng(0)
    medians = np.median(generator.choice(values, (RESAMPLES, len(values))), axis=1)
    low, high = np.percentile(medians, [2.5, 97.5])
    return float(low), float(high)


def gate(base: ArmResult, other: ArmResult, model_bytes: int, compare_peaks: bool) -> str | None:
    """Why two runs can not be compared; None when they can. Peaks are not compared with an arm that lives in the page cache: it
    takes what its cgroup allows, which no other arm passes either."""
    largest = max(base.peak_bytes, other.peak_bytes)
    if compare_peaks and abs(base.peak_bytes - other.peak_bytes) > GATE * largest:
        return f"peak memory {base.peak_bytes:,} and {other.peak_bytes:,} bytes"
    if abs(base.cached_bytes - other.cached_bytes) > GATE * model_bytes:
        return f"{base.cached_bytes:,} and {other.cached_bytes:,} bytes of the model in the page cache at the start"
    return None


def run_pairs(
    runs: Sequence[ArmRun],
    count: int,
    prompts: Sequence[str],
    execute: Callable[[ArmRun], ArmResult],
    judge: Callable[[ArmResult, ArmResult, str], str | None],
    progress: Callable[[int, int], None],
) -> list[Comparison]:
    """`count` pairs of runs[0] with each other arm and with itself (NOISE), round by round.

    Pair n takes the prompts n, n + count, n + 2 count, ..., so that all pairs of an arm together take each once, or prompt n
    modulo their number; in odd rounds the other arm goes first. `judge` says why a pair is void; it is then run again, RETRIES
    times at most. HuornError when two runs gave different tokens.
    """
    base = runs[0]
    others = [*((run.arm, run) for run in runs[1:]), (NOISE, base)]
    found = {name: Comparison(name) for name, _ in others}
    told: dict[str, tuple[int, ...]] = {}
    for number in range(count):
        some = tuple(prompts[number::count]) or (prompts[number % len(prompts)],)
        for place, (name, other) in enumerate(others):
            progress(number * len(others) + place, count * len(others))
            for _ in range(1 + RETRIES):
                two = [run.model_copy(update={"prompts": some}) for run in (base, other)]
                results = [execute(run) for run in (two[::-1] if number % 2 else two)]
                for run, result in zip(two[::-1] if number % 2 else two, results, strict=True):
                    _same_tokens(run, result, told)
                first, second = results[::-1] if number % 2 else results
                pair = Pair(number, first, second, judge(first, second, other.arm))
                found[name].pairs.append(pair)
                if pair.void is None:
                    break
    return list(found.values())


def _same_tokens(run: ArmRun, result: ArmResult, told: dict[str, tuple[int, ...]]) -> None:
    """Whatever is resident and forecast, the tokens of a prompt are those of its first run."""
    for prompt, ids in zip(run.prompts, result.ids, strict=True):
        want = told.setdefault(prompt, ids)
        if want != ids:
            place = next(n for n, (a, b) in enumerate(zip(want, ids, strict=True)) if a != b)
            raise HuornError(
                f"arm {run.arm} gave token {ids[place]} where {want[place]} was given before, {place} tokens behind the prompt "
                f"{prompt[:40]!r}: arms must not differ"
            )
