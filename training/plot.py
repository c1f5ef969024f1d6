"""The training curves as a picture."""

from __future__ import annotations

import csv
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def draw_curves(source: Path, target: Path) -> None:
    """Draw loss, held-out bits per byte and routing figures of a loss.csv over millions of tokens."""
    with source.open() as file:
        rows = list(csv.DictReader(file))
    millions = [int(row["tokens"]) / 1e6 for row in rows]
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    left.plot(
        millions, [float(row["loss"]) for row in rows], color="tab:gray", linewidth=0.8, label="training loss"
    )
    left.set(xlabel="million tokens", ylabel="nats per token", title="Loss", ylim=(0.8, 5))
    bits = left.twinx()
    measured = [
        (x, float(row["bpb_python"])) for x, row in zip(millions, rows, strict=True) if row["bpb_python"]
    ]
    if measured:
        bits.plot(*zip(*measured, strict=True), "o-", color="tab:blue", markersize=3)
    bits.set_ylabel("bits per byte, held-out Python", color="tab:blue")
    right.plot(millions, [float(row["overlap"]) for row in rows], label="consecutive-token overlap")
    right.plot(
        millions, [float(row["hottest_quarter"]) for row in rows], label="share of the hottest quarter"
    )
    right.axhline(0.125, color="tab:gray", linestyle=":", label="overlap of random routing")
    right.set(xlabel="million tokens", title="Routing", ylim=(0, 1))
    right.legend()
    figure.savefig(target, dpi=110)
    plt.close(figure)
