"""Reader of `route_trace v1`, the CSV in which BigMoeOnEdge records which experts each token was routed to."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from huorn.errors import TraceError, reason

FIRST_LINE = "# route_trace v1"
COLUMNS = "turn,phase,step,layer,slot,expert,weight,residency,expert_bytes"
_SHAPE = re.compile(r"# model=(.*) arch=(\S+) n_layer=(\d{1,6}) n_expert=(\d{1,6}) n_expert_used=(\d{1,6})")
_BYTES = re.compile(r"# layer=(\d{1,6}) expert_bytes=(\d{1,15})(?: .*)?")
_DECODE = 1  # of column phase; 0 is prefill


@dataclass(frozen=True, eq=False)
class LayerCall:
    """One layer ran for T tokens: ids int32 [T, K] by rank. A prefill is one call per layer."""

    layer: int
    ids: NDArray[np.int32]
    decode: bool


@dataclass(frozen=True, eq=False)
class RouteTrace:
    """The layer calls of a recorded session in the order in which they ran; expert_bytes [layers] of one expert of each layer."""

    model: str
    layers: int
    experts: int
    top_k: int
    expert_bytes: tuple[int, ...]
    calls: tuple[LayerCall, ...]

    @property
    def all_bytes(self) -> int:
        """Of all experts of the model."""
        return self.experts * sum(self.expert_bytes)


def read_route_csv(path: Path) -> RouteTrace:
    """Reads a whole trace. Raises TraceError naming file, line and what would be right."""
    try:
        text = path.read_bytes().decode()
    except OSError as error:
        raise TraceError(f"{path} can not be read: {reason(error)}") from error
    except UnicodeDecodeError as error:
        raise TraceError(f"{path} is not a route trace: byte {error.start} is no UTF-8") from error
    lines = text.splitlines()
    if not lines or lines[0] != FIRST_LINE:
        raise TraceError(f"{path} is not a route trace: its first line is not {FIRST_LINE!r}")
    start = next((number for number, line in enumerate(lines) if not line.startswith("#")), len(lines))
    if start == len(lines) or lines[start] != COLUMNS:
        raise TraceError(f"{path}: line {start + 1} does not name the columns {COLUMNS}")
    shapes = [found for line in lines[1:start] if (found := _SHAPE.fullmatch(line))]
    if len(shapes) != 1:
        raise TraceError(
            f"{path} has {len(shapes)} header lines with model, n_layer, n_expert and n_expert_used instead of one"
        )
    layers, experts, top_k = (int(number) for number in shapes[0].groups()[2:])
    if not (layers and 1 <= top_k <= experts):
        raise TraceError(
            f"{path}: its header claims {layers} layers with {top_k} of {experts} experts per token"
        )
    sizes = {int(found[1]): int(found[2]) for line in lines[1:start] if (found := _BYTES.fullmatch(line))}
    expert_bytes = tuple(sizes.get(layer, 0) for layer in range(layers))
    if not all(expert_bytes):
        raise TraceError(
            f"{path}: its header does not say how many bytes an expert of layer {expert_bytes.index(0)} has"
        )
    calls = tuple(_calls(path, lines, start + 1, (layers, top_k, experts)))
    if not calls:
        raise TraceError(f"{path} records no token")
    return RouteTrace(shapes[0][1], layers, experts, top_k, expert_bytes, calls)


def _calls(path: Path, lines: list[str], start: int, shape: tuple[int, int, int]) -> Iterator[LayerCall]:
    """The layer calls of the rows from line `start`: turn after turn, its prefill before its decode, layer after layer."""
    layers, top_k, experts = shape
    tokens: dict[
        tuple[int, int, int, int], list[int]
    ] = {}  # (turn, phase, step, layer) -> expert of each rank, or -1
    for number, line in enumerate(lines[start:], start + 1):
        try:
            turn, phase, step, layer, rank, expert = map(int, line.split(",")[:6])
            if line.count(",") != COLUMNS.count(","):
                raise ValueError
        except ValueError:
            raise TraceError(f"{path}: line {number} is no row of {COLUMNS}") from None
        if not (
            turn >= 0 <= step
            and phase in (0, _DECODE)
            and 0 <= layer < layers
            and 0 <= rank < top_k
            and 0 <= expert < experts
        ):
            raise TraceError(
                f"{path}: line {number} leaves the {layers} layers, {top_k} ranks and {experts} experts of the header"
            )
        chosen = tokens.setdefault((turn, phase, step, layer), [-1] * top_k)
        if chosen[rank] >= 0 or expert in chosen:
            raise TraceError(f"{path}: line {number} repeats a rank or an expert of its token")
        chosen[rank] = expert
    calls: dict[tuple[int, int, int, int], list[list[int]]] = defaultdict(list)
    for (turn, phase, step, layer), chosen in sorted(tokens.items()):
        if -1 in chosen:
            raise TraceError(
                f"{path}: turn {turn}, phase {phase}, step {step}, layer {layer} lacks rank {chosen.index(-1)}"
            )
        calls[turn, phase, step if phase == _DECODE else 0, layer].append(chosen)
    for (_, phase, _, layer), rows in sorted(calls.items()):
        yield LayerCall(layer, np.array(rows, dtype=np.int32), phase == _DECODE)
