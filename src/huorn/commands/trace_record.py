"""`huorn trace record` and `huorn trace import`: routing into a trace."""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path

from huorn.checkpoint.config import read_config
from huorn.commands.model_choice import ModelChoice
from huorn.commands.output import note
from huorn.commands.progress import byte_progress, step_progress
from huorn.engine.session import checked_context, checked_threads, existing_model
from huorn.memory import format_bytes
from huorn.model.precision import Precision
from huorn.trace.folder import TraceFolder, open_folder
from huorn.trace.import_csv import import_route_csv
from huorn.trace.manifest import SPLITS, Manifest
from huorn.trace.plan_recording import RecordingPlan, Request, plan_recording
from huorn.trace.record import record as fill


def record(choice: ModelChoice, request: Request, out: Path) -> None:
    """Record the prompts that are not in `out` yet. What is wrong with prompts, folder or disk is said before it
    loads the model.

    Ctrl-C keeps whole chunks, and the same command goes on behind them.
    """
    directory = existing_model(choice.directory)
    context = checked_context(choice.context, read_config(directory))
    checked_threads(choice.threads)
    with byte_progress("reading prompts") as progress:
        plan = plan_recording(request, directory, context, Precision(choice.precision), progress)
    with open_folder(out, plan.manifest) as folder:
        before = folder.manifest
        if before.recorded < len(before.prompts):
            folder.check_room(plan.most_rows(before.recorded))
            for line in split_lines(before):
                print(line, flush=True)
            if before.recorded:
                note(
                    f"going on behind {before.recorded} of {len(before.prompts)} prompts, which are recorded"
                )
            _record(choice, folder, plan)
        _say_what_is_there(folder, before)


def _record(choice: ModelChoice, folder: TraceFolder, plan: RecordingPlan) -> None:
    rows = folder.manifest.rows
    with closing(choice.open()) as session, step_progress("recording prompts") as progress:
        begin = time.monotonic()
        try:
            fill(session, folder, plan, progress)
        except KeyboardInterrupt:
            done, total = folder.manifest.recorded, len(folder.manifest.prompts)
            note(
                f"stopped: {done} of {total} prompts are in whole chunks; the same command goes on behind them"
            )
            raise
        seconds = time.monotonic() - begin
    print(
        f"{folder.manifest.rows - rows} rows in {seconds:.1f} s, {(folder.manifest.rows - rows) / seconds:.1f} a second"
    )


def _say_what_is_there(folder: TraceFolder, before: Manifest) -> None:
    manifest = folder.manifest
    state = "was recorded already" if before == manifest else "is recorded"
    chunks = counted(len(manifest.chunks), "chunk")
    size = format_bytes(manifest.rows * manifest.row_bytes)
    print(
        f"{folder.folder} {state}: {manifest.rows} rows of {manifest.model.layers} layers in {chunks}, {size}"
    )


def split_lines(manifest: Manifest) -> list[str]:
    """What prompts there are, which of them are alike, and how they are split."""
    prompts, duplicates = manifest.prompts, manifest.duplicates
    counts = {split: sum(prompt.split == split for prompt in prompts) for split in SPLITS}
    by = "groups of duplicates" if manifest.split_by == "prompt" else "time"
    lines = [
        f"{len(prompts)} prompts, split by {by}: "
        + ", ".join(f"{count} {name}" for name, count in counts.items())
    ]
    equal = sum(len(same) - 1 for same in duplicates.exact)
    if equal:
        first = duplicates.exact[0]
        lines.append(
            f"{counted(equal, 'prompt')} equal to one before, such as number {first[1]} to {first[0]} (counted from 0)"
        )
    if duplicates.near:
        pair = duplicates.near[0]
        lines.append(
            f"{counted(len(duplicates.near), 'pair')} nearly equal, such as numbers {pair.first} and {pair.second}, which share "
            f"{100 * pair.similarity:.0f} % of their runs of words; they stay in one split"
        )
    return lines


def counted(number: int, noun: str) -> str:
    """1 chunk, 2 chunks."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def import_trace(csv: Path, out: Path) -> None:
    """Import a `route_trace v1` CSV."""
    with step_progress("writing prompts") as progress:
        manifest = import_route_csv(csv, out, progress)
    for line in split_lines(manifest):
        print(line)
    print(
        f"{manifest.rows} decode steps of {manifest.model.name}, {manifest.model.layers} layers, "
        f"{format_bytes(manifest.rows * manifest.row_bytes)}: {out}; no text, hidden states or router logits in it"
    )
