"""Train seedling: `python -m training.train --work DIR`, after `python -m training.prepare --work DIR`.

Two single-threaded processes each take half of a batch, add up their gradients in shared memory and each step half of
the weights; one process with two threads loses more in OpenMP barriers than this costs. State is written every
`SAVE_EVERY` steps, so the same command goes on where a killed run stopped. Curves: DIR/loss.csv and DIR/loss.png.
"""

from __future__ import annotations

import csv
import ctypes
import json
import signal
import time
from dataclasses import dataclass
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import torch.multiprocessing as mp
import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from training.measure import bits_per_byte, held_out, routing_figures
from training.model import Seedling, Shape, init_weights
from training.optim import Flat, Optimizer, split_work
from training.plot import draw_curves

RANKS = 2
SEQUENCE = 1024  # tokens
SEQUENCES_PER_RANK = 4
TOKENS_PER_STEP = RANKS * SEQUENCES_PER_RANK * SEQUENCE
WARMUP, DECAY_SHARE = 40, 0.95  # steps; share of all steps
# Of each kind of text, the share of its documents that is trained on: Python leads, since that is what seedling is
# judged by, and the others keep routing varied.
KEPT = {"python": 1.0, "chat": 1.0, "c": 0.4, "prose": 0.45, "data": 0.5}
BALANCE = 0.0005  # 0.005 flattened routing: consecutive tokens shared 0.19 of their experts, which no real model shows
SEED = 20260
SAVE_EVERY, MEASURE_EVERY, LOG_EVERY = 100, 200, 10
BARRIER_TIMEOUT = 900  # seconds; rank 0 measures and saves between two steps
MEASURE_TOKENS = 40_000  # per kind, for the curve; the final figures use every held-out file
COLUMNS = [
    "step",
    "tokens",
    "loss",
    "balance",
    "overlap",
    "hottest_quarter",
    "dead",
    "rate_share",
    "seconds",
    "bpb_python",
]


@dataclass(frozen=True)
class Shared:
    """What both processes see: one flat buffer each for weights and moments, one gradient buffer per rank."""

    weights: Tensor
    first: Tensor
    second: Tensor
    gradients: tuple[Tensor, ...]


def learning_rate(step: int, steps: int) -> float:
    """Share of the peak rate: warm up, hold, fall linearly to zero over the last `DECAY_SHARE`. step counts from 1."""
    decay = int(steps * DECAY_SHARE)
    return min(1.0, step / WARMUP, (steps - step + 1) / decay)


def mixture(work: Path) -> np.ndarray:
    """The tokens to train on, uint16: the documents of work/train.bin that `KEPT` lets through, in file order."""
    tokens = np.memmap(work / "train.bin", dtype=np.uint16, mode="r")
    starts = [*np.load(work / "train.docs.npy").tolist(), len(tokens)]
    names = json.loads((work / "corpus.json").read_text())["kinds"]
    draws = np.random.default_rng(SEED).random(len(starts) - 1)
    kept = [
        tokens[starts[i] : starts[i + 1]]
        for i, kind in enumerate(np.load(work / "train.kinds.npy").tolist())
        if draws[i] < KEPT[names[kind]]
    ]
    return np.concatenate(kept)


def batch(tokens: np.ndarray, step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets [SEQUENCES_PER_RANK, SEQUENCE] int64 of one step (from 1), a function of the arguments alone:
    every epoch visits the windows of the corpus in an order drawn from its number."""
    windows = (len(tokens) - 1) // SEQUENCE
    per_step = RANKS * SEQUENCES_PER_RANK
    rows = []
    for i in range(SEQUENCES_PER_RANK):
        index = (step - 1) * per_step + rank * SEQUENCES_PER_RANK + i
        order = np.random.default_rng(SEED + index // windows).permutation(windows)
        start = int(order[index % windows]) * SEQUENCE
        rows.append(torch.from_numpy(tokens[start : start + SEQUENCE + 1].astype(np.int64)))
    stacked = torch.stack(rows)
    return stacked[:, :-1].contiguous(), stacked[:, 1:].contiguous()


def save_state(path: Path, shared: Shared, step: int, seconds: float) -> None:
    """Write everything a resumed run needs, whole or not at all."""
    scratch = path.with_suffix(".tmp")
    tensors = {"weights": shared.weights, "first": shared.first, "second": shared.second}
    save_file(tensors, scratch, metadata={"step": str(step), "seconds": str(seconds)})
    scratch.replace(path)


def load_state(path: Path, shared: Shared) -> tuple[int, float]:
    """Fill `shared` from a saved state and return its step and the seconds trained so far."""
    with safe_open(path, framework="pt") as file:
        for name, target in (("weights", shared.weights), ("first", shared.first), ("second", shared.second)):
            target.copy_(file.get_tensor(name))
        metadata = file.metadata()
    return int(metadata["step"]), float(metadata["seconds"])


class Watch:
    """What rank 0 does besides training: progress, loss.csv, measurements, saved states."""

    def __init__(
        self, work: Path, shared: Shared, model: Seedling, steps: int, done: int, seconds: float
    ) -> None:
        self.work, self.shared, self.model, self.steps, self.done = work, shared, model, steps, done
        self.seconds_before, self.resumed = seconds, time.monotonic()
        self.watched = [d for d in held_out(work, MEASURE_TOKENS) if d.kind == "python"]
        self.file = (work / "loss.csv").open("r+" if done else "w", newline="")
        rows = [row for row in csv.reader(self.file) if row and row[0].isdigit() and int(row[0]) <= done]
        self.file.seek(0)
        self.file.truncate()
        self.writer = csv.writer(self.file)
        self.writer.writerows([COLUMNS, *rows])
        self.progress = Progress(TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
        self.task = self.progress.add_task("training", total=steps, completed=done)
        self.progress.start()

    def after(self, step: int, loss: Tensor, balance: Tensor) -> None:
        """Log, measure and save as often as the constants above say; always after the last step."""
        last = step == self.steps
        if step % LOG_EVERY == 0 or last:
            self.log(step, loss.item(), balance.item(), measure=step % MEASURE_EVERY == 0 or last)
        if step % SAVE_EVERY == 0 or last:
            save_state(self.work / "state.safetensors", self.shared, step, self.seconds)
            draw_curves(self.work / "loss.csv", self.work / "loss.png")
        if last:
            self.progress.stop()

    def log(self, step: int, loss: float, balance: float, measure: bool) -> None:
        """One row of loss.csv and one line of progress."""
        seen = routing_figures(self.model.routing, self.model.shape.num_experts, SEQUENCES_PER_RANK)
        bits = f"{bits_per_byte(self.model, self.watched)['python']:.4f}" if measure else ""
        row = (loss, balance, seen.overlap, seen.hottest_quarter)
        share = learning_rate(step, self.steps)
        rounded = (f"{value:.4f}" for value in row)
        self.writer.writerow(
            [step, step * TOKENS_PER_STEP, *rounded, seen.dead, f"{share:.4f}", f"{self.seconds:.1f}", bits]
        )
        self.file.flush()
        rate = TOKENS_PER_STEP * (step - self.done) / (time.monotonic() - self.resumed)
        text = f"step {step}/{self.steps} loss {loss:.3f} overlap {seen.overlap:.2f} {rate:,.0f} tok/s"
        self.progress.update(self.task, completed=step, description=text)
        if not self.progress.console.is_terminal:
            print(text, f"python {bits} bits/byte" if bits else "", flush=True)

    @property
    def seconds(self) -> float:
        """Seconds trained so far, interrupted runs included."""
        return self.seconds_before + time.monotonic() - self.resumed


def train(
    rank: int, work: Path, steps: int, shared: Shared, barrier: Barrier, done: int, seconds: float
) -> None:
    """One rank's share of every step from `done` + 1 on."""
    torch.set_num_threads(1)
    if rank:  # die with the main process, also when that one is killed
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    shape = Shape()
    sizes = {name: tensor.shape for name, tensor in init_weights(shape, SEED).items()}
    weights = Flat(sizes, shared.weights)
    gradients = [Flat(sizes, buffer) for buffer in shared.gradients]
    names = split_work(sizes, RANKS)[rank]
    optimizer = Optimizer(weights, Flat(sizes, shared.first), Flat(sizes, shared.second), names)
    leaves = {name: view.detach().requires_grad_() for name, view in weights.views.items()}
    for name, leaf in leaves.items():
        leaf.grad = gradients[rank].views[name]
    model = Seedling(shape, leaves)
    tokens = mixture(work)
    watch = Watch(work, shared, model, steps, done, seconds) if rank == 0 else None
    for step in range(done + 1, steps + 1):
        gradients[rank].buffer.zero_()
        loss, balance = model.loss(*batch(tokens, step, rank))
        (loss + BALANCE * balance * shape.num_hidden_layers).backward()
        barrier.wait(BARRIER_TIMEOUT)  # both gradients are complete
        mean = {name: (gradients[0].views[name] + gradients[1].views[name]) / RANKS for name in names}
        with torch.no_grad():
            optimizer.step(mean, learning_rate(step, steps), step)
        barrier.wait(BARRIER_TIMEOUT)  # all weights are stepped
        if watch is not None:
            watch.after(step, loss.detach(), balance.detach())


def main(
    work: Annotated[Path, typer.Option(help="folder with the prepared corpus; state and curves go here too")],
    steps: Annotated[int, typer.Option(help=f"optimizer steps of {TOKENS_PER_STEP:,} tokens")] = 1050,
) -> None:
    """Train seedling on the prepared corpus, or go on with a run that was interrupted."""
    if not (work / "train.bin").exists():
        raise typer.BadParameter(
            f"{work} has no train.bin: run python -m training.prepare --work {work} first"
        )
    start = torch.cat([tensor.reshape(-1) for tensor in init_weights(Shape(), SEED).values()])
    moments = [torch.zeros_like(start).share_memory_() for _ in range(2 + RANKS)]
    shared = Shared(start.share_memory_(), moments[0], moments[1], tuple(moments[2:]))
    state = work / "state.safetensors"
    done, seconds = load_state(state, shared) if state.exists() else (0, 0.0)
    context = mp.get_context("spawn")
    barrier = context.Barrier(RANKS)
    helper = context.Process(target=train, args=(1, work, steps, shared, barrier, done, seconds), daemon=True)
    helper.start()
    train(0, work, steps, shared, barrier, done, seconds)
    helper.join()


if __name__ == "__main__":
    typer.run(main)
