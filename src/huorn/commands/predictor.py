"""`huorn predictor train`, `evaluate`, `release` and `verify`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from huorn.commands.output import check_json_path, note, write_json
from huorn.commands.progress import step_progress
from huorn.commands.trace_record import counted
from huorn.errors import UsageError
from huorn.machine.facts import allowed_cores
from huorn.predictor.bank import bank_from_run
from huorn.predictor.bank_files.bank_loader import to_int8
from huorn.predictor.baselines import EQUAL_LEAD
from huorn.predictor.evaluate import PRECISIONS, Evaluation, best_baseline
from huorn.predictor.evaluate import evaluate as score
from huorn.predictor.recall import KS
from huorn.predictor.release.card import head_bytes
from huorn.predictor.release.export import release as write_bank
from huorn.predictor.release.verify import verify_bank
from huorn.predictor.released import open_bank
from huorn.predictor.run_folder import RUN, TrainSettings, read_run, remember_traces, remembered_traces
from huorn.predictor.train import make_spec, parse_layers, traces_digest
from huorn.predictor.train import train as fit
from huorn.trace.recording import Traces


def train(
    traces_folder: Path,
    out: Path,
    layers: str | None,
    profile: str,
    settings: TrainSettings,
    workers: int | None,
    without: tuple[str, ...],
    uncaptured: str | None,
    text_tokens: int | None,
    model: Path | None,
) -> None:
    """Train the heads of `layers` that are not trained yet."""
    traces = Traces.open(traces_folder)
    count = traces.manifest.model.layers
    wanted = list(range(count)) if layers is None else parse_layers(layers, count)
    zeros = tuple(parse_layers(uncaptured, count, "--uncaptured")) if uncaptured else ()
    spec = make_spec(traces, profile, settings, without, zeros, text_tokens)
    done: dict[int, tuple[int, int]] = {}
    with step_progress(f"training {len(wanted)} heads") as progress:

        def report(layer: int, step: int, steps: int) -> None:
            done[layer] = step, steps
            ended = sum(step / steps for step, steps in done.values()) / len(wanted)
            progress(round(1000 * ended), 1000)

        drawn = fit(traces, spec, wanted, out, workers or allowed_cores(), model, report)
    remember_traces(out, traces_folder)
    print(f"{out}: {counted(len(wanted), 'head')} trained; {RUN} says how")
    if not drawn:
        note("curves.png was not drawn: that needs matplotlib, which the extra 'train' brings")


def evaluate(sources: list[Path], traces_folder: Path, json: Path | None, force: bool) -> None:
    """Evaluate runs and banks on the same rows."""
    check_json_path(json)
    traces, found = Traces.open(traces_folder), dict[str, Evaluation]()
    for source in sources:
        bank, full = bank_from_run(source) if (source / RUN).exists() else (open_bank(source), None)
        profile = bank.config.features.profile
        if profile in found:
            raise UsageError(
                f"{source} has the profile {profile}, as one before it: evaluate one of each at a time"
            )
        with step_progress(f"scoring {source.name}") as progress:
            found[profile] = score(bank, full, traces, progress, force)
        if bank.config.provenance.traces != traces_digest(traces):
            note(
                f"{source} was trained on other traces than {traces_folder}: what it was fitted to may be in this test split"
            )
        if found[profile].forced:
            note(f"forced: {found[profile].forced}")
        _show(found[profile])
    write_json(json, as_json(found))


def as_json(found: dict[str, Evaluation]) -> dict[str, Any]:
    """recall[profile][precision][split][layer][K], baselines[name][split][layer][K], and the rest by profile."""
    first = next(iter(found.values()))
    return {
        "recall": {profile: one.recall for profile, one in found.items()},
        "baselines": first.baselines,
        "rows": first.rows,
        "by_position": {profile: one.by_position for profile, one in found.items()},
        "without": {profile: one.without for profile, one in found.items()},
        "layers": {profile: one.layers for profile, one in found.items()},
        "forced": {profile: one.forced for profile, one in found.items()},
        "full_windows": {profile: one.full_windows for profile, one in found.items()},
    }


def _show(found: Evaluation) -> None:
    console = Console()
    test = found.recall["bf16"]["test"]
    console.print(
        _table(
            f"profile {found.profile}: test split, BF16", "layer", [(label, test[label]) for label in test]
        )
    )
    means = [
        (f"{p} {split}", found.recall[p][split]["mean"]) for p in PRECISIONS for split in found.recall[p]
    ]
    means += [(f"{name} (test)", rows["test"]["mean"]) for name, rows in found.baselines.items()]
    means += [(f"without {block} (validation)", rows["mean"]) for block, rows in found.without.items()]
    means += [(f"steps from {label} (test)", row) for label, row in found.by_position["test"].items()]
    console.print(_table("means over all heads", "", means))
    name, best = best_baseline(found, EQUAL_LEAD, "test", 8)
    gained = (test["mean"]["8"] - best) / (1 - best) if best < 1 else 0.0
    print(
        f"recall@8 {test['mean']['8']:.4f} on {found.rows['test']:,} test rows: {100 * gained:.0f} % of the way from {name} "
        f"({best:.4f}), the best forecast of equal lead, to 1"
    )


def _table(title: str, first: str, rows: list[tuple[str, dict[str, float]]]) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column(first)
    for k in KS:
        table.add_column(f"@{k}", justify="right")
    for label, row in rows:
        table.add_row(label, *(f"{row[str(k)]:.3f}" for k in KS))
    return table


def release(
    run: Path, out: Path, traces_folder: Path | None, repo: str | None, revision: str, notice: str
) -> None:
    """Evaluate, export and gate a run."""
    spec = read_run(run)
    traces = Traces.open(traces_folder or remembered_traces(run))
    if traces_digest(traces) != spec.traces:
        raise UsageError(
            f"{traces.folder} is not what {run} was trained on, so its test split is not untouched: give those traces"
        )
    if out.exists():
        raise UsageError(f"{out} exists: name a new folder for the bank")
    for option, text in (("--repo", repo or ""), ("--revision", revision)):
        if not text.isprintable():
            raise UsageError(f"{option} {text!r} must be printable text in one line: it stands in the card")
    base = spec.base_model.model_copy(update={"repo": repo or spec.base_model.repo, "revision": revision})
    bank, full = bank_from_run(run, base)
    with step_progress("scoring") as progress:
        found = score(bank, full, traces, progress)
    gate = write_bank(bank, found, out, notice)
    size = head_bytes(to_int8(bank))
    print(
        f"{out}: {len(found.layers)} heads of {size / 1e6:.2f} MB in int8; {gate.tensors} tensors and "
        f"{gate.int8_buffers} int8 buffers are byte for byte what training made, {gate.sets} input sets score alike"
    )


def verify(folder: Path) -> None:
    """Say whether a bank is as released."""
    found = verify_bank(folder)
    base = found.bank.config.base_model
    print(
        f"{folder}: all {found.files} files are as released; {len(found.bank.config.heads.layers)} heads for {base.repo}, "
        f"{found.gate.int8_buffers} int8 buffers equal"
    )
    print(
        found.other_environment
        or f"the scores of all {found.gate.sets} input sets are equal here, to the bit"
    )
    if found.gate.native_bound_used is not None:
        print(
            f"the native int8 scorer uses {100 * found.gate.native_bound_used:.0f} % of the error that rounding allows"
        )
