"""How well the router of the next layer, asked one layer early, foresees which experts that layer will use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from huorn.checkpoint.fingerprint import model_fingerprint
from huorn.checkpoint.reader import Checkpoint
from huorn.errors import UsageError
from huorn.trace.recording import Traces

MOST_ROWS = 4096  # of a trace, spread over it: a recall of 0.5 is then known to 0.003, eight experts a row
AT = 8


@dataclass(frozen=True)
class LayerRecall:
    """Of the experts that a layer used, the share among the 8 and the K that its router scored highest on the input of the
    layer before; None for layer 0, which has none before it."""

    at_8: float | None
    at_k: float | None


def next_gate_recall(
    traces: Traces, checkpoint: Checkpoint, progress: Callable[[int, int], None]
) -> list[LayerRecall]:
    """Of every layer, on at most MOST_ROWS rows; progress(layers done, layers in all).

    Router weights as stored times hidden states as recorded, in F32. Raises UsageError when the trace has no hidden states or is
    of another model, CheckpointError.
    """
    model = traces.manifest.model
    if "hidden" not in traces.manifest.captured:
        raise UsageError(
            f"{traces.folder} holds no hidden states, which the next-layer gate needs: leave out --model"
        )
    if model.fingerprint != model_fingerprint(checkpoint):
        raise UsageError(
            f"{traces.folder} was recorded of another model than {checkpoint.directory}: give that one as --model"
        )
    recalls, before = [LayerRecall(None, None)], _sample(traces, 0, "hidden")
    for layer in range(1, model.layers):
        progress(layer, model.layers)
        router = checkpoint.tensor(f"layers.{layer}.mlp.gate.weight").float().numpy()
        scores = before.astype(np.float32) @ router.T
        used = _sample(traces, layer, "ids")
        recalls.append(LayerRecall(_recall(scores, used, AT), _recall(scores, used, model.top_k)))
        before = _sample(traces, layer, "hidden")
    progress(model.layers, model.layers)
    return recalls


def sampled_rows(traces: Traces) -> int:
    """How many rows `next_gate_recall` looks at."""
    return len(range(0, traces.manifest.rows, _stride(traces)))


def _sample(traces: Traces, layer: int, field: str) -> NDArray[np.generic]:
    """A field of every n-th row."""
    stride, offset, parts = _stride(traces), 0, []
    for chunk in traces.chunks:
        parts.append(np.array(chunk.layer(layer)[offset::stride][field]))
        offset = (offset - chunk.count) % stride
    return np.concatenate(parts)


def _stride(traces: Traces) -> int:
    return max(1, -(-traces.manifest.rows // MOST_ROWS))


def _recall(scores: NDArray[np.float32], used: NDArray[np.generic], count: int) -> float:
    """The share of ids used [T, K] that are among the `count` largest of scores f32 [T, E], ties to the lower id."""
    best = np.argsort(-scores, axis=1, kind="stable")[:, :count]
    return float(np.count_nonzero(used[:, :, None] == best[:, None, :]) / used.size)
