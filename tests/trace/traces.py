"""Small traces, and where the recorded ones are."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest

from huorn.trace.route_csv import COLUMNS, FIRST_LINE, LayerCall, RouteTrace, read_route_csv

RECORDED = Path(__file__).parents[3] / "shared" / "traces"


@cache
def recorded(name: str) -> RouteTrace:
    return read_route_csv(recorded_file(name))


def recorded_file(name: str) -> Path:
    path = RECORDED / f"{name}.route.csv"
    if not path.is_file():
        pytest.skip(f"shared/traces/{name}.route.csv is not here")
    return path


def trace_of(
    layers: int, experts: int, calls: list[tuple[int, list[list[int]], bool]], expert_bytes: list[int]
) -> RouteTrace:
    """From (layer, ids, decode)."""
    made = tuple(LayerCall(layer, np.array(ids, dtype=np.int32), decode) for layer, ids, decode in calls)
    return RouteTrace("m", layers, experts, made[0].ids.shape[1], tuple(expert_bytes), made)


def csv_of(
    rows: list[tuple[int, int, int, int, int, int]], shape: str = "n_layer=2 n_expert=8 n_expert_used=2"
) -> str:
    """From (turn, phase, step, layer, rank, expert)."""
    lines = [
        FIRST_LINE,
        f"# model=/a b/m.gguf arch=x {shape}",
        "# layer=0 expert_bytes=100 dense_bytes=7",
        "# layer=1 expert_bytes=80",
        COLUMNS,
        *(",".join(map(str, row)) + ",0.5,0,100" for row in rows),
    ]
    return "\n".join(lines) + "\n"
