"""`huorn bench pairs`: arms of the engine in matched pairs."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from huorn.bench.arms import ARMS, MMAP, ArmResult, ArmRun, run_arm, uses_bank
from huorn.bench.memory_group import MemoryGroup
from huorn.bench.pairs import gate, run_pairs
from huorn.bench.pairs_report import JSON, as_json, markdown, write_report
from huorn.bench.run_log import RunLog
from huorn.checkpoint.reader import Checkpoint
from huorn.commands.output import note, write_json
from huorn.commands.progress import step_progress
from huorn.engine.fast_tier import Residency, plan_fast_tier
from huorn.engine.forecasting import Forecasting
from huorn.engine.open_decoder import predictor_bytes
from huorn.engine.session import existing_model
from huorn.errors import HuornError, UsageError, reason
from huorn.experts.store import ExpertStore
from huorn.machine.page_cache import cached_bytes, drop_pages
from huorn.machine.speed import measure_disk_read
from huorn.model.precision import Precision

RUNS = "runs.jsonl"  # while the pairs are not finished


@dataclass(frozen=True)
class PairsRequest:
    """The options of the command; slots are a share or a number, those of arms without a bank."""

    arms: tuple[str, ...]
    pairs: int
    prompts: Path
    out: Path
    max_tokens: int
    memory_bytes: int | None
    slots: float | None
    context: int
    threads: int | None
    forecasting: Forecasting
    link_bytes_s: float | None
    predictor_slots: int | None


def bench_pairs(directory: Path | None, asked: PairsRequest) -> None:
    """Run the pairs, print the page and write it down. An interrupted call goes on with the runs that it has made."""
    directory = existing_model(directory)
    _check(asked)
    prompts = read_prompts(asked.prompts)
    checkpoint = Checkpoint.open(directory)
    files = sorted(directory.glob("*.safetensors"))
    runs = plan_runs(checkpoint, asked)
    try:
        asked.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out {asked.out} can not be made: {reason(error)}") from error
    log = RunLog(asked.out / RUNS)
    limit = next(run for run in runs if run.arm != MMAP).memory_bytes if MMAP in asked.arms else None
    disk_bytes_s = asked.link_bytes_s

    def execute(run: ArmRun) -> ArmResult:
        nonlocal disk_bytes_s
        if asked.link_bytes_s is None:
            disk_bytes_s = measure_disk_read(directory).bytes_per_s
        drop_pages(files)
        cached = cached_bytes(files)
        group = _group(limit) if limit is not None and run.arm == MMAP else None
        try:
            result = run_arm(run if group is None else run.model_copy(update={"cgroup": str(group.tasks)}))
        finally:
            if group is not None:
                group.close()
        return result.model_copy(update={"cached_bytes": cached, "disk_bytes_s": disk_bytes_s or 0.0})

    size = sum(path.stat().st_size for path in files)

    def judge(first: ArmResult, second: ArmResult, arm: str) -> str | None:
        return gate(first, second, size, MMAP not in (arm, runs[0].arm))

    title = f"{directory.name}: {', '.join(asked.arms)}"
    command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
    settings = {"command": command, **runs[0].model_dump(mode="json", exclude={"prompts"})}
    with step_progress("pairs") as progress:
        found = run_pairs(runs, asked.pairs, prompts, lambda run: log.get(run, execute), judge, progress)
    write_json(asked.out / JSON, as_json(settings, runs[0].arm, found))
    print(markdown(title, command, runs[0].arm, found))
    for comparison in found:
        for pair in comparison.pairs:
            if pair.void is not None:
                note(f"void, {comparison.arm}, pair {pair.number}: {pair.void}")
    for path in write_report(asked.out, title, command, runs[0].arm, found):
        note(f"written to {path}")
    log.remove()


def _check(asked: PairsRequest) -> None:
    for arm in asked.arms:
        if arm not in ARMS:
            raise UsageError(f"--arms {arm!r} is not known; there are {', '.join(ARMS)}")
    if len(set(asked.arms)) != len(asked.arms):
        raise UsageError("--arms names one twice; the first is compared with itself anyway")
    for name, value, least in (("--pairs", asked.pairs, 1), ("--max-tokens", asked.max_tokens, 2)):
        if value < least:
            raise UsageError(f"{name} is {value}, but it must be {least} or more")
    if (asked.memory_bytes is None) == (asked.slots is None):
        raise UsageError("give one of --memory and --slots: arms are compared in equal memory")
    if asked.predictor_slots is not None and asked.slots is None:
        raise UsageError("--predictor-slots goes with --slots: with --memory a bank costs what it takes")
    asked.forecasting.check()


def read_prompts(path: Path) -> list[str]:
    """The "prompt" of each line of a JSONL file. Raises UsageError."""
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise UsageError(f"--prompts {path} can not be read as JSON lines: {reason(error)}") from error
    found = [line.get("prompt") if isinstance(line, dict) else None for line in lines]
    if not found or not all(isinstance(prompt, str) and prompt for prompt in found):
        raise UsageError(f'--prompts {path} must have a {{"prompt": "..."}} on each line, and at least one')
    return [str(prompt) for prompt in found]


def plan_runs(checkpoint: Checkpoint, asked: PairsRequest) -> list[ArmRun]:
    """Each arm's run, without prompts, in equal memory: what a bank takes is paid for with slots. Raises UsageError."""
    folder = asked.forecasting.bank_of(checkpoint.directory)
    if folder is None and any(uses_bank(arm) for arm in asked.arms):
        raise UsageError(f"{checkpoint.directory} has no bank beside it: name one with --predictor")
    bank_bytes = predictor_bytes(folder)
    common = ArmRun(
        arm="", model=checkpoint.directory, prompts=(), max_tokens=asked.max_tokens, context=asked.context, threads=asked.threads,
        memory_bytes=asked.memory_bytes, predictor=asked.forecasting.predictor, caps=asked.forecasting.caps,
        link_bytes_s=asked.link_bytes_s,
    )  # fmt: skip
    if asked.slots is None:
        return [common.model_copy(update={"arm": arm}) for arm in asked.arms]
    tier = plan_fast_tier(
        checkpoint, Residency(slots=asked.slots), asked.context, Precision.BF16, asked.threads or 1
    )
    slot_bytes = ExpertStore.of(checkpoint).slot_bytes
    paid = -(-bank_bytes // slot_bytes) if asked.predictor_slots is None else asked.predictor_slots
    least = checkpoint.config.num_experts_per_tok
    if any(uses_bank(arm) for arm in asked.arms) and tier.slots - paid < least:
        raise UsageError(
            f"the bank takes as much memory as {paid} of {tier.slots} slots, and a layer needs {least}: give more --slots"
        )
    holds = folder if asked.predictor_slots is not None else None
    return [
        common.model_copy(
            update={"arm": arm, "slots": tier.slots - paid}
            if uses_bank(arm)
            else {"arm": arm, "slots": tier.slots, "holds": holds}
        )
        for arm in asked.arms
    ]


def _group(limit: int) -> MemoryGroup:
    try:
        return MemoryGroup(limit)
    except OSError as error:
        raise HuornError(
            f"the arm {MMAP} needs a memory cgroup, which this user may not make ({reason(error)}): run as root or leave it out"
        ) from error
