"""`huorn synth`: write a synthetic checkpoint."""

from __future__ import annotations

from pathlib import Path

from huorn.commands.progress import byte_progress
from huorn.memory import format_bytes
from huorn.synth import synthesize


def synth(preset: str, out: Path, layers: int | None, seed: int, manifest: bool) -> None:
    """Write the checkpoint and print what was written, at which speed."""
    with byte_progress("writing") as progress:
        report = synthesize(preset, out, layers, seed, progress, manifest)
    print(
        f"{report.tensors} tensors in {report.shards} shards, {format_bytes(report.total_bytes)}, {report.layers} layers, "
        f"seed {report.seed}: {report.directory}"
    )
    print(
        f"{format_bytes(report.written_bytes)} written in {report.seconds:.1f} s, {report.bytes_per_s / 1e9:.2f} GB/s"
    )
    print("the weights are random numbers: fit for measuring, not for text")
