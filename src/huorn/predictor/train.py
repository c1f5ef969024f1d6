"""Training of many heads, each by one thread, some at a time; killed and called again, it ends with the same weights."""

from __future__ import annotations

import csv
import ctypes
import fcntl
import hashlib
import multiprocessing
import os
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from huorn.errors import UsageError
from huorn.predictor.bank import read_heads
from huorn.predictor.bank_files.int8_bank import GROUP
from huorn.predictor.base_model import recorded_embedding, recorded_model
from huorn.predictor.profiles import make_contract, token_table
from huorn.predictor.run_folder import (
    RUN,
    TOKEN_TABLE,
    WEIGHTS,
    RunSpec,
    TrainSettings,
    head_folder,
    open_run,
    read_token_table,
    write_tensors,
)
from huorn.predictor.train_head import Report, train_head
from huorn.trace.layout import MANIFEST
from huorn.trace.recording import Traces

_POLL_S = 0.2
MOST_TRUNK = 8192  # units; 100 MB a head in the 35B shape
_PR_SET_PDEATHSIG = 1  # of Linux's prctl


def parse_layers(text: str, layers: int, option: str = "--layers") -> list[int]:
    """`6-39` or `0,3,6-8` -> ascending layer numbers. UsageError when they are no layers of a model that has `layers`."""
    found = set[int]()
    for part in text.split(","):
        ends = part.strip().split("-")
        if not 1 <= len(ends) <= 2 or not all(end.isascii() and end.isdigit() for end in ends):
            raise UsageError(
                f"{option} {text} is not understood: give numbers and ranges, such as 6-39 or 0,3,6-8"
            )
        first, last = int(ends[0]), int(ends[-1])
        if first > last or last >= layers:
            raise UsageError(f"{option} {text} leaves the layers of the traces, 0 to {layers - 1}")
        found.update(range(first, last + 1))
    return sorted(found)


def make_spec(
    traces: Traces,
    profile: str,
    settings: TrainSettings,
    without: tuple[str, ...] = (),
    uncaptured: tuple[int, ...] = (),
    text_tokens: int | None = None,
) -> RunSpec:
    """What a run is. UsageError when the traces lack what the profile reads, or an option makes no sense."""
    manifest = traces.manifest
    base = recorded_model(manifest, "recorded")
    if profile != "routing" and not {"hidden", "logits"} <= set(manifest.captured):
        raise UsageError(
            f"{traces.folder} holds no hidden states and router logits, which profile {profile} reads: use --profile routing"
        )
    if profile == "routing":
        base = base.model_copy(update={"hidden_size": 0})
    for name, value in (
        ("--trunk", settings.trunk),
        ("--epochs", settings.epochs),
        ("--batch", settings.batch),
    ):
        if value < 1:
            raise UsageError(f"{name} is {value}, but it must be 1 or more")
    if not 0 < settings.learning_rate <= 1:  # NaN is not either
        raise UsageError(f"--learning-rate is {settings.learning_rate}, but it must be above 0 and at most 1")
    if not 0 <= settings.seed < 2**31:
        raise UsageError(f"--seed is {settings.seed}, but it must be from 0 to {2**31 - 1}")
    if settings.trunk % GROUP or settings.trunk > MOST_TRUNK:
        raise UsageError(
            f"--trunk is {settings.trunk}, but it must be a multiple of {GROUP} up to {MOST_TRUNK:,}: so many inputs share a "
            "scale in int8"
        )
    if settings.pool is not None and settings.pool < 1:
        raise UsageError(f"--pool is {settings.pool}, but it must be 1 or more prompts")
    if text_tokens is not None and not 1 <= text_tokens <= base.vocab_size:
        raise UsageError(f"--text-tokens is {text_tokens}, but the vocabulary has {base.vocab_size}")
    rows = base.vocab_size if text_tokens is None else text_tokens
    contract = make_contract(profile, rows, base.hidden_size, uncaptured, without)
    if "tokens" in contract.blocks:
        most = max(int(max(chunk.rows["id"].max(), chunk.rows["next_id"].max())) for chunk in traces.chunks)
        if most >= rows:
            raise UsageError(
                f"{traces.folder} has token id {most}, which has no row in a table of {rows}: give a larger "
                "--text-tokens, or traces of "
                "text alone"
            )
    return RunSpec(base_model=base, features=contract, settings=settings, traces=traces_digest(traces))


def traces_digest(traces: Traces) -> str:
    """SHA-256 of their manifest, which has those of all files."""
    return hashlib.sha256((traces.folder / MANIFEST).read_bytes()).hexdigest()


def train(
    traces: Traces,
    spec: RunSpec,
    layers: Sequence[int],
    run: Path,
    workers: int,
    model: Path | None,
    report: Report,
) -> bool:
    """Trains what is not trained yet; whether curves could be drawn. Raises UsageError, TraceError, CheckpointError."""
    if workers < 1:
        raise UsageError(f"--workers is {workers}, but it must be 1 or more")
    # Before the folder is begun: another model than the recorded one must leave nothing behind.
    table = None if (run / RUN).exists() else _token_table(traces, spec, model)
    open_run(run, spec)
    with _locked(run):
        path = run / TOKEN_TABLE
        if path.exists():  # a run goes on with the table that it began with, without the model
            table = read_token_table(run)
        else:
            table = _token_table(traces, spec, model) if table is None else table
            write_tensors(path, {"token_table": table})
        todo = [layer for layer in layers if not (head_folder(run, layer) / WEIGHTS).exists()]
        if len(todo) < len(layers):
            read_heads(
                run, [layer for layer in layers if layer not in todo], spec
            )  # what is said to be trained must be
        if workers == 1 or len(todo) == 1:
            with _one_thread():
                for layer in todo:
                    train_head(traces, spec, table, run, layer, report)
        elif todo:
            _in_processes(traces.folder, spec, run, todo, min(workers, len(todo)), report)
        return draw_curves(run, layers)


@contextmanager
def _locked(run: Path) -> Iterator[None]:
    """UsageError while another process trains into the same folder."""
    fd = os.open(run, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise UsageError(f"{run} is being written by another huorn: wait for it") from error
    finally:
        os.close(fd)  # the lock goes with it


def _token_table(traces: Traces, spec: RunSpec, model: Path | None) -> Tensor:
    embedded = spec.features.token_source == "embedding" and spec.features.token_width > 0
    return token_table(spec.features, recorded_embedding(model, traces.manifest) if embedded else ())


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _in_processes(
    folder: Path, spec: RunSpec, run: Path, layers: Sequence[int], workers: int, report: Report
) -> None:
    context = multiprocessing.get_context("spawn")
    queue: Any = context.Queue()
    with ProcessPoolExecutor(workers, context, _start_worker, (queue, os.getpid())) as pool:
        left = {pool.submit(_train_in_worker, folder, spec, run, layer) for layer in layers}
        try:
            while left:
                done, left = wait(left, _POLL_S, FIRST_COMPLETED)
                while not queue.empty():
                    report(*queue.get())
                for future in done:
                    future.result()
        except BrokenProcessPool as error:
            raise UsageError(
                "a worker was ended from outside, perhaps for the memory it took: use fewer --workers or a smaller "
                "--pool; what was "
                "trained is kept"
            ) from error
        except BaseException:
            for future in left:
                future.cancel()
            for process in multiprocessing.active_children():
                process.terminate()
            raise


_queue: Any = None


def _start_worker(queue: Any, parent: int) -> None:
    """A worker ends with its parent, even one that was killed: who calls that again must not find old ones writing."""
    global _queue
    _queue = queue
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    torch.set_num_threads(1)


def _train_in_worker(folder: Path, spec: RunSpec, run: Path, layer: int) -> None:
    table = read_token_table(run)

    def report(layer: int, step: int, steps: int) -> None:
        if step % 10 == 0 or step == steps:
            _queue.put((layer, step, steps))

    train_head(Traces.open(folder), spec, table, run, layer, report)


def draw_curves(run: Path, layers: Sequence[int]) -> bool:
    """Writes curves.png, recall@8 and loss on validation by epoch, a line for each head. False when matplotlib is not there."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for layer in layers:
        path = head_folder(run, layer) / "curve.csv"
        try:
            lines = list(csv.DictReader(path.read_text(encoding="utf-8").splitlines()))
            epochs = [int(line["epoch"]) for line in lines]
            curves = {
                name: [float(line[name]) for line in lines]
                for name in ("validation_loss", "train_loss", "recall_8")
            }
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(
                f"{path} is damaged or can not be read: delete {path.parent} and train it anew"
            ) from error
        color = f"C{layer % 10}"
        left.plot(epochs, curves["validation_loss"], color=color, label=f"layer {layer}")
        left.plot(epochs, curves["train_loss"], color=color, linestyle=":", linewidth=0.8)
        right.plot(epochs, curves["recall_8"], color=color, label=f"layer {layer}")
    for axes in (left, right):
        axes.xaxis.get_major_locator().set_params(integer=True)
    left.set(xlabel="epoch", ylabel="loss: validation, dotted: training")
    right.set(xlabel="epoch", ylabel="recall@8, validation")
    right.legend(fontsize=7, ncols=2)
    figure.savefig(run / "curves.png", dpi=110)
    return True
