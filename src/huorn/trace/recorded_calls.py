"""The layer calls of a recorded trace, as a replay takes them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from huorn.errors import TraceError
from huorn.trace.manifest import Split
from huorn.trace.recording import Traces
from huorn.trace.route_csv import FIRST_LINE, LayerCall, RouteTrace, read_route_csv


def read_replay(path: Path, splits: Sequence[Split] = ("test",), prompts: int | None = None) -> RouteTrace:
    """A route_trace v1 file, or the (first) prompts of some splits of a recorded trace one after the other, each row a step.

    A recorded trace does not know how large an expert is; each counts as one byte. Raises TraceError when `path` is neither, or
    the splits have no rows.
    """
    if path.is_file():
        return read_route_csv(path)
    if not path.is_dir():
        raise TraceError(
            f"{path} can not be replayed: give a folder that huorn trace record wrote, or a file that begins with {FIRST_LINE!r}"
        )
    traces = Traces.open(path)
    model = traces.manifest.model
    calls: list[LayerCall] = []
    for split in splits:
        for prompt in traces.split(split)[:prompts]:
            own = slice(prompt.first, prompt.first + prompt.count)
            by_layer = [
                prompt.chunk.layer(layer)["ids"][own].astype(np.int32) for layer in range(model.layers)
            ]
            calls += [
                LayerCall(layer, by_layer[layer][step : step + 1], decode=True, turn=prompt.prompt, step=step)
                for step in range(prompt.count)
                for layer in range(model.layers)
            ]
    if not calls:
        raise TraceError(f"{path} has no rows in its {' and '.join(splits)} split: record more prompts")
    return RouteTrace(model.name, model.layers, model.experts, model.top_k, (1,) * model.layers, tuple(calls))
