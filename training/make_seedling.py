"""From nothing to the embedded model: `python -m training.make_seedling --work DIR`. Every step resumes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer


def main(
    work: Annotated[Path, typer.Option(help="folder for sources, corpus, training state and exports")],
    steps: Annotated[int, typer.Option(help="optimizer steps")] = 1050,
) -> None:
    """Prepare the corpus, train, export as F32 and FP8, and judge both on the held-out files."""
    at = ["--work", str(work)]
    step("training.prepare", *at)
    step("training.train", *at, "--steps", str(steps))
    for layout in ("f32", "fp8"):
        step("training.export", *at, "--out", str(work / layout), "--format", layout)
    step("training.evaluate", *at, str(work / "f32"), str(work / "fp8"))


def step(module: str, *arguments: str) -> None:
    """Run one step in a process of its own; stop at the first that fails."""
    finished = subprocess.run([sys.executable, "-m", module, *arguments], check=False)
    if finished.returncode:
        raise typer.Exit(finished.returncode)


if __name__ == "__main__":
    typer.run(main)
