"""Arms of a benchmark: one configuration of the engine each, run in a process of its own.

The process reads an ArmRun as JSON from stdin and writes an ArmResult as JSON to stdout.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from huorn.checkpoint.reader import Checkpoint
from huorn.engine.fast_tier import Residency
from huorn.engine.forecasting import OFF, Forecasting
from huorn.engine.process import peak_rss_bytes
from huorn.engine.sampling import Sampler, SamplingSettings
from huorn.engine.session import Session
from huorn.engine.tokenizer import encode
from huorn.errors import HuornError, UsageError
from huorn.experts.policy import DEFAULT_POLICY
from huorn.model.cpu_decoder import CpuDecoder
from huorn.predictor.served_bank import ServedBank
from huorn.schedule.shapes import PREFILL_CHUNK

MMAP, PLAIN, ENGINE = "mmap", "plain", "engine"
# What an arm adds to `engine`: stripes, overlap, the best policy without forecasts.
ADDED = {
    "lookahead": "what the next layer's router makes of this layer's input is copied",
    "prefetch": "forecasts start copies",
    "retention": "forecasts decide who leaves",
    "both": "prefetch and retention",
    "all": "both and lookahead",
}
ARMS = (MMAP, PLAIN, ENGINE, *(f"{ENGINE}+{name}" for name in ADDED))


# glibc's heap keeps what it happens to get: peaks of seedling were 300 to 313 MB without this, 293.5 to 294.8 with it.
STEADY_HEAP = {
    "MALLOC_ARENA_MAX": "1", "MALLOC_TRIM_THRESHOLD_": "131072", "MALLOC_MMAP_THRESHOLD_": "131072"
}  # fmt: skip


def uses_bank(arm: str) -> bool:
    """Whether an arm forecasts with a bank."""
    return arm.partition("+")[2] in ("prefetch", "retention", "both", "all")


class ArmRun(BaseModel):
    """What one process does. A bank that it `holds` is loaded and not used, so that arms with and without one are equally
    large."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    arm: str
    model: Path
    prompts: tuple[str, ...]
    max_tokens: int
    context: int
    threads: int | None = None
    memory_bytes: int | None = None
    slots: int | None = None
    predictor: str = "auto"
    caps: str = "3"
    link_bytes_s: float | None = None
    holds: Path | None = None
    cgroup: str | None = None  # file of tasks of the memory cgroup to enter

    @property
    def residency(self) -> Residency:
        """The engine's options of this arm."""
        if self.arm == MMAP:
            return Residency(mapped="plain", forecasting=Forecasting(OFF))
        added = self.arm.partition("+")[2]
        bank = self.predictor if uses_bank(self.arm) else OFF
        caps = "0" if added == "retention" else self.caps
        return Residency(
            self.memory_bytes, self.slots, DEFAULT_POLICY if added == "prefetch" else None,
            forecasting=Forecasting(bank, caps, lookahead=added in ("lookahead", "all")),
            link_bytes_s=self.link_bytes_s, overlap=self.arm != PLAIN,
        )  # fmt: skip


class ArmResult(BaseModel):
    """Of all prompts of a run together; `ids` are the tokens that each gave. Times in seconds and bytes per decoded token."""

    ids: tuple[tuple[int, ...], ...]
    tok_s: float
    token_s: float
    hit_rate: float
    late_rate: float
    misses: float
    disk_bytes: float
    wait_s: float
    kernel_s: float
    predictor_s: float
    prefetched: float
    prefetched_used: float
    slots: int
    peak_bytes: int
    cached_bytes: int = 0  # of the model's files in the page cache at the start
    disk_bytes_s: float = 0.0  # what the disk gave in direct reads beside this run
    log: tuple[str, ...] = ()


def run_arm(run: ArmRun) -> ArmResult:
    """Runs `run` in a process of its own. HuornError with its last line when it fails."""
    done = subprocess.run(
        [sys.executable, "-m", "huorn.bench.arms"], input=run.model_dump_json(), env=os.environ | STEADY_HEAP,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise HuornError(f"arm {run.arm} failed: {last.removeprefix('error: ')}")
    return ArmResult.model_validate_json(done.stdout.splitlines()[-1])


def measure(run: ArmRun) -> ArmResult:
    """Decodes every prompt greedily, exactly max_tokens tokens; end tokens do not end it. Raises UsageError, CheckpointError."""
    if run.cgroup is not None:
        with open(run.cgroup, "a") as file:
            file.write("0")  # this process
    held = None if run.holds is None else ServedBank.open(run.holds, Checkpoint.open(run.model))
    session = Session.open(run.model, run.context, run.threads, residency=run.residency)
    decoder, cache, forecaster = session.decoder, session.cache, session.forecaster
    assert isinstance(decoder, CpuDecoder)
    if cache is None and run.arm != MMAP:
        raise UsageError("all experts fit into this memory: give less --memory, or --slots")
    if uses_bank(run.arm) and forecaster is None:
        raise UsageError(f"{run.model} has no bank beside it: name one with --predictor")
    sums = dict.fromkeys(
        ("time", "hits", "late", "misses", "disk", "wait", "kernel", "spent", "begun", "used"), 0.0
    )

    def now() -> dict[str, float]:
        found = {"time": time.perf_counter(), "kernel": decoder.runtime.seconds()}
        if cache is not None:
            counts, ahead = cache.counts, cache.brought.counts
            found |= {
                "hits": counts.hits, "late": counts.loading_hits, "misses": counts.misses, "wait": counts.wait_s,
                "disk": cache.reader.bytes_read, "begun": ahead.begun, "used": ahead.used,
            }  # fmt: skip
        if forecaster is not None:
            found["spent"] = forecaster.control.spent_s
        return found

    ids, steps = [], 0
    for text in run.prompts:
        ids.append(_decode(session, text, run.max_tokens, now, sums))
        steps += run.max_tokens - 1
    lookups = sums["hits"] + sums["late"] + sums["misses"]
    each = {name: value / steps for name, value in sums.items()}
    del held  # until here
    return ArmResult(
        ids=tuple(ids), tok_s=1 / each["time"], token_s=each["time"], hit_rate=sums["hits"] / lookups if lookups else 0.0,
        late_rate=sums["late"] / lookups if lookups else 0.0, misses=each["misses"], disk_bytes=each["disk"],
        wait_s=each["wait"], kernel_s=each["kernel"], predictor_s=each["spent"], prefetched=each["begun"],
        prefetched_used=each["used"], slots=0 if cache is None else cache.slots.count, peak_bytes=peak_rss_bytes(),
        log=() if forecaster is None else tuple(forecaster.control.log),
    )  # fmt: skip


def _decode(
    session: Session, text: str, tokens: int, now: Callable[[], dict[str, float]], sums: dict[str, float]
) -> tuple[int, ...]:
    """Greedy ids; what the decode steps took is added to `sums`."""
    prompt, state, sampler = (
        encode(session.tokenizer, text),
        session.new_state(),
        Sampler(SamplingSettings(), []),
    )
    if not prompt or len(prompt) + tokens > session.context:
        raise UsageError(
            f"a prompt of {len(prompt)} tokens and {tokens} generated ones do not fit in a context of {session.context}"
        )
    for first in range(0, len(prompt), PREFILL_CHUNK):
        token = state.read(prompt[first : first + PREFILL_CHUNK])
    ids, before = [sampler.pick(token)], now()
    for _ in range(tokens - 1):
        ids.append(sampler.pick(state.decode(ids[-1])))
    for name, value in now().items():
        sums[name] += value - before[name]
    return tuple(ids)


def main() -> None:
    """The process of one arm."""
    try:
        result = measure(ArmRun.model_validate_json(sys.stdin.read()))
    except HuornError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    print(result.model_dump_json())


if __name__ == "__main__":
    main()
