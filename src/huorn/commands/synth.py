"""`huorn synth`: write a synthetic checkpoint, and measure how it routes where that was asked for."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from huorn.commands.output import check_json_path, note, write_json
from huorn.commands.progress import byte_progress, step_progress
from huorn.memory import format_bytes
from huorn.synth import synthesize


def synth(
    preset: str,
    out: Path,
    layers: int | None,
    seed: int,
    manifest: bool,
    overlap: float | None,
    measure: bool,
    json_path: Path | None,
) -> None:
    """Write the checkpoint and print what was written, at which speed; with `overlap` and `measure`, what came of it.

    Ctrl-C while it is measured ends the measurement alone: the checkpoint is complete.
    """
    check_json_path(json_path)
    with byte_progress("writing") as progress:
        report = synthesize(preset, out, layers, seed, progress, manifest, overlap)
    print(
        f"{report.tensors} tensors in {report.shards} shards, {format_bytes(report.total_bytes)}, {report.layers} layers, "
        f"seed {report.seed}: {report.directory}"
    )
    print(
        f"{format_bytes(report.written_bytes)} written in {report.seconds:.1f} s, {report.bytes_per_s / 1e9:.2f} GB/s"
    )
    print("the weights are random numbers: fit for measuring, not for text", flush=True)
    routing = _measured(out, overlap) if overlap is not None and measure else None
    written = {**asdict(report), "directory": str(report.directory), "bytes_per_s": report.bytes_per_s}
    write_json(json_path, {**written, "overlap": overlap, "routing": routing})


def _measured(directory: Path, asked: float) -> dict[str, float] | None:
    """Decode, print and return the figures of routing; None when Ctrl-C ended it."""
    from huorn.bench.routing import (
        PROMPT_TOKENS,
        measure_routing,
    )  # PyTorch and the kernels: not needed to write
    from huorn.engine.session import Session

    note("measuring on a short decode; the checkpoint is complete, Ctrl-C leaves this out")
    try:
        session = Session.open(directory)
        with step_progress("decoding") as progress:
            found = measure_routing(session, progress)
    except KeyboardInterrupt:
        note("not measured")
        return None
    print(
        f"overlap {found.overlap:.3f} (asked for {asked:g}): the share of a token's experts that the next one uses again"
    )
    print(
        f"hottest quarter {found.hottest_quarter:.3f} of use (uniform routing of as few tokens: "
        f"{found.chance_hottest_quarter:.3f}; of many: 0.25)"
    )
    print(
        f"on {found.sequences} x {found.tokens} tokens drawn at temperature 1 after {PROMPT_TOKENS} of prompt, "
        f"{found.different_tokens} of them different"
    )
    return asdict(found)
