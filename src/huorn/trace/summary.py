"""What is in a trace, and how its layers route: the figures of `huorn trace show`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from huorn.errors import UsageError
from huorn.trace.manifest import SPLITS
from huorn.trace.recording import Traces
from huorn.trace.routing_stats import hottest_quarter, overlap


@dataclass(frozen=True)
class SplitSize:
    """Recorded prompts, and their rows; prompts in all, recorded or not."""

    recorded: int
    prompts: int
    rows: int


@dataclass(frozen=True)
class LayerFigures:
    """See routing_stats. `overlap` None where no prompt has two rows."""

    overlap: float | None
    hottest_quarter: float


@dataclass(frozen=True)
class TraceSummary:
    """Of all chunks together; `chance_overlap` is that of independent uniform routing."""

    rows: int
    bytes: int
    splits: dict[str, SplitSize]
    exact_duplicates: int  # prompts that are equal to one before them
    near_duplicates: int  # pairs that joined two groups
    groups: int
    chance_overlap: float
    layers: tuple[LayerFigures, ...]


def summarize(traces: Traces, progress: Callable[[int, int], None]) -> TraceSummary:
    """Reads the experts of every row; progress(layers done, layers in all). Raises UsageError when nothing is recorded yet."""
    manifest, model = traces.manifest, traces.manifest.model
    if not traces.chunks:
        raise UsageError(
            f"{traces.folder} has no whole chunk yet: the same huorn trace record goes on with it"
        )
    prompts = Counter(prompt.split for prompt in manifest.prompts)
    recorded = Counter(prompt.split for prompt in manifest.prompts if prompt.chunk is not None)
    rows = {name: sum(prompt.count for prompt in traces.split(name)) for name in SPLITS}
    sequences = _sequences(traces)
    figures = []
    for layer in range(model.layers):
        progress(layer, model.layers)
        ids = np.concatenate([np.array(chunk.layer(layer)["ids"], dtype=np.int32) for chunk in traces.chunks])
        hottest = hottest_quarter(ids[:, None], model.experts)
        figures.append(LayerFigures(_overlap(ids, sequences), hottest))
    progress(model.layers, model.layers)
    return TraceSummary(
        rows=manifest.rows,
        bytes=manifest.rows * manifest.row_bytes,
        splits={name: SplitSize(recorded[name], prompts[name], rows[name]) for name in SPLITS},
        exact_duplicates=sum(len(same) - 1 for same in manifest.duplicates.exact),
        near_duplicates=len(manifest.duplicates.near),
        groups=len({prompt.group for prompt in manifest.prompts}),
        chance_overlap=model.top_k / model.experts,
        layers=tuple(figures),
    )


def _sequences(traces: Traces) -> list[tuple[int, int]]:
    """(first, end) of each prompt of at least two rows, among the rows of all chunks."""
    starts = np.concatenate([[0], np.cumsum([chunk.count for chunk in traces.chunks])])
    return [
        (
            int(starts[prompt.chunk]) + prompt.first_row,
            int(starts[prompt.chunk]) + prompt.first_row + prompt.rows,
        )
        for prompt in traces.manifest.prompts
        if prompt.chunk is not None and prompt.rows > 1
    ]


def _overlap(ids: NDArray[np.int32], sequences: list[tuple[int, int]]) -> float | None:
    """Of ids int32 [T, K] of one layer; each pair of consecutive rows of a prompt counts once."""
    if not sequences:
        return None
    weights = [end - first - 1 for first, end in sequences]
    return float(np.average([overlap(ids[first:end, None]) for first, end in sequences], weights=weights))
