"""Recorded routing of other programs as a trace: the decode steps of a `route_trace v1` CSV, split by time."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np

from huorn.errors import TraceError, reason
from huorn.trace.chunk_writer import ChunkWriter
from huorn.trace.folder import TraceFolder, open_folder
from huorn.trace.layout import ROW
from huorn.trace.manifest import Duplicates, Manifest, PromptEntry, RecordedModel, Source, Split
from huorn.trace.plan_recording import CHUNK_ROWS
from huorn.trace.route_csv import LayerCall, RouteTrace, read_route_csv
from huorn.trace.splits import split_by_time


@dataclass(frozen=True)
class _Piece:
    """Consecutive decode steps of one turn that are in one split: for each step the calls of all layers."""

    turn: int
    split: Split
    steps: list[tuple[LayerCall, ...]]

    def sha256(self) -> str:
        """Of the experts of all steps and layers."""
        ids = np.concatenate([call.ids for calls in self.steps for call in calls])
        return hashlib.sha256(ids.astype("<i4").tobytes()).hexdigest()


def import_route_csv(path: Path, out: Path, progress: Callable[[int, int], None]) -> Manifest:
    """Writes the decode steps of the CSV to the folder `out`, and returns its manifest.

    One prompt is a run of consecutive decode steps of one turn, cut where a split ends; prefill is left out, but for its length.
    Ids and weights of experts are known, token ids and positions are not (-1). progress(prompts done, prompts in all).
    Raises TraceError for a damaged file, UsageError for too few steps or an `out` that holds something else.
    """
    trace = read_route_csv(path)
    try:
        checksum = hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise TraceError(f"{path} can not be read as a route trace: {reason(error)}") from error
    pieces = _pieces(path, trace)
    turns: dict[int, int] = {}
    prompt_tokens = {call.turn: len(call.ids) for call in trace.calls if not call.decode and call.layer == 0}
    entries = [
        PromptEntry(
            sha256=piece.sha256(), split=piece.split, group=turns.setdefault(piece.turn, len(turns)), chunk=None, first_row=0,
            rows=0, prompt_tokens=prompt_tokens.get(piece.turn, 0),
        )
        for piece in pieces
    ]  # fmt: skip
    manifest = Manifest(
        model=RecordedModel(
            fingerprint=None, name=Path(trace.model).name, layers=trace.layers, experts=trace.experts, top_k=trace.top_k,
            hidden=None, vocab=None,
        ),
        mode="import",
        tokens=None,
        precision=None,
        isa=None,
        source=Source(name=path.name, sha256=checksum),
        split_by="time",
        captured=("ids", "weights"),
        chunk_rows=CHUNK_ROWS,
        duplicates=Duplicates(),
        prompts=tuple(entries),
    )  # fmt: skip
    with open_folder(out, manifest) as folder:
        _fill(folder, pieces, progress)
        return folder.manifest


def _fill(folder: TraceFolder, pieces: list[_Piece], progress: Callable[[int, int], None]) -> None:
    folder.check_room(sum(len(piece.steps) for piece in pieces[folder.manifest.recorded :]))

    def write_prompt(index: int, writer: ChunkWriter) -> None:
        steps = pieces[index].steps
        rows = np.full(len(steps), -1, dtype=np.int32).astype(ROW)  # every field -1
        rows["prompt"], rows["step"] = index, np.arange(len(steps))
        writer.add_rows(rows)
        for layer in range(folder.manifest.model.layers):
            calls = [step[layer] for step in steps]
            weights = [call.weights for call in calls if call.weights is not None]
            writer.add_layer(
                layer, ids=np.concatenate([call.ids for call in calls]), weights=np.concatenate(weights)
            )

    folder.fill(write_prompt, progress)


def _pieces(path: Path, trace: RouteTrace) -> list[_Piece]:
    """Decode steps in the order in which they ran, cut at turns, gaps and ends of splits."""
    decode = [call for call in trace.calls if call.decode]
    steps = [tuple(calls) for _, calls in groupby(decode, lambda call: (call.turn, call.step))]
    if steps and [call.layer for call in steps[0]] != list(range(trace.layers)):
        missing = min(set(range(trace.layers)) - {call.layer for call in steps[0]})
        raise TraceError(
            f"{path} says nothing of layer {missing} in decode, so it can not be a trace of {trace.layers} layers"
        )
    pieces = list[_Piece]()
    before = -1  # step
    for calls, split in zip(steps, split_by_time(len(steps)), strict=True):
        turn, step = calls[0].turn, calls[0].step
        if pieces and (pieces[-1].turn, pieces[-1].split, before + 1) == (turn, split, step):
            pieces[-1].steps.append(calls)
        else:
            pieces.append(_Piece(turn, split, [calls]))
        before = step
    return pieces
