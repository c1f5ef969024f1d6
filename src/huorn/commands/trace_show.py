"""`huorn trace show`: what is in a trace, and how its layers route."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from huorn.checkpoint.reader import Checkpoint
from huorn.commands.output import check_json_path, write_json
from huorn.commands.progress import byte_progress, step_progress
from huorn.commands.trace_record import counted, split_lines
from huorn.engine.session import existing_model
from huorn.memory import format_bytes
from huorn.trace.next_gate import AT, LayerRecall, next_gate_recall, sampled_rows
from huorn.trace.plot import check_plot_path, plot_layers
from huorn.trace.recording import Traces
from huorn.trace.summary import TraceSummary, summarize


def show(folder: Path, model: Path | None, verify: bool, plot: Path | None, json_path: Path | None) -> None:
    """Print sizes, splits and the figures of each layer; with `model` also what the next-layer gate foresees."""
    check_json_path(json_path)
    if plot is not None:
        check_plot_path(plot)
    traces = Traces.open(folder)
    if verify:
        with byte_progress("reading") as progress:
            traces.verify(progress)
    with step_progress("reading layers") as progress:
        summary = summarize(traces, progress)
    recalls = None if model is None else _recalls(traces, model)
    for line in _lines(traces, summary, verify):
        print(line)
    _print_layers(traces, summary, recalls)
    if plot is not None:
        _plot(plot, traces, summary, recalls)
    write_json(json_path, _as_json(traces, summary, recalls))


def _recalls(traces: Traces, model: Path) -> list[LayerRecall]:
    checkpoint = Checkpoint.open(existing_model(model))
    with step_progress("asking the next gate") as progress:
        return next_gate_recall(traces, checkpoint, progress)


def _lines(traces: Traces, summary: TraceSummary, verified: bool) -> list[str]:
    manifest = traces.manifest
    splits = ", ".join(
        f"{name} {counted(size.rows, 'row')} of {counted(size.recorded, 'prompt')}"
        for name, size in summary.splits.items()
    )
    unrecorded = len(manifest.prompts) - manifest.recorded
    tokens = "" if manifest.tokens is None else f", at most {manifest.tokens} tokens each"
    return [
        f"{manifest.model.name}, {manifest.model.layers} layers, {manifest.model.top_k} of {manifest.model.experts} experts, "
        f"mode {manifest.mode}{tokens}, from {manifest.source.name}",
        *split_lines(manifest),
        splits,
        f"{summary.rows} rows with {', '.join(manifest.captured)} in {counted(len(manifest.chunks), 'chunk')}, "
        f"{format_bytes(summary.bytes)}",
        *([f"{counted(unrecorded, 'prompt')} not recorded yet"] if unrecorded else []),
        *(["every checksum fits, every number is finite"] if verified else []),
    ]


def _print_layers(traces: Traces, summary: TraceSummary, recalls: list[LayerRecall] | None) -> None:
    top_k = traces.manifest.model.top_k
    table = Table(box=None, pad_edge=False)
    names = ["layer", "overlap", "hottest quarter"]
    if recalls is not None:
        names += [f"next gate at {count}" for count in dict.fromkeys((AT, top_k))]
    for name in names:
        table.add_column(name, justify="right")
    for number, layer in enumerate(summary.layers):
        values = [layer.overlap, layer.hottest_quarter]
        if recalls is not None:
            values += [recalls[number].at_8, *([] if top_k == AT else [recalls[number].at_k])]
        table.add_row(str(number), *("-" if value is None else f"{value:.3f}" for value in values))
    Console(file=sys.stdout).print(table, markup=False)
    print(f"overlap of uniform routing: {summary.chance_overlap:.3f}; hottest quarter of even use: 0.25")
    if recalls is not None:
        print(
            f"next gate: share of a layer's experts among those that its router scores highest on the input of the layer before, "
            f"on {sampled_rows(traces)} rows"
        )
    elif "hidden" in traces.manifest.captured:
        print("no next-layer gate: it needs the router weights, so name the recorded model with --model DIR")
    else:
        print("no next-layer gate: hidden states were not recorded")


def _plot(path: Path, traces: Traces, summary: TraceSummary, recalls: list[LayerRecall] | None) -> None:
    curves: list[tuple[str, list[float | None]]] = [
        ("overlap of consecutive tokens", [layer.overlap for layer in summary.layers]),
        ("hottest quarter's share of use", [layer.hottest_quarter for layer in summary.layers]),
    ]
    if recalls is not None:
        curves.append((f"next-layer gate, recall at {AT}", [recall.at_8 for recall in recalls]))
        if traces.manifest.model.top_k != AT:
            curves.append(
                (
                    f"next-layer gate, recall at {traces.manifest.model.top_k}",
                    [recall.at_k for recall in recalls],
                )
            )
    title = f"{traces.manifest.model.name}: {summary.rows} rows, mode {traces.manifest.mode}"
    plot_layers(path, title, curves, summary.chance_overlap)


def _as_json(traces: Traces, summary: TraceSummary, recalls: list[LayerRecall] | None) -> dict[str, object]:
    manifest = traces.manifest.model_dump(mode="json", by_alias=True, exclude={"prompts", "chunks"})
    layers = [asdict(layer) for layer in summary.layers]
    for number, layer in enumerate(layers):
        layer["next_gate"] = None if recalls is None else asdict(recalls[number])
    chunks = [{"name": chunk.entry.name, "rows": chunk.count} for chunk in traces.chunks]
    return {**manifest, **asdict(summary), "layers": layers, "chunks": chunks}
