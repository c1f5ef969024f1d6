"""Reader of `route_trace v1`, the CSV in which BigMoeOnEdge records which experts each token was routed to."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from huorn.errors import TraceError, reason

FIRST_LINE = "# route_trace v1"
COLUMNS = "turn,phase,step,layer,slot,expert,weight,residency,expert_bytes"
_SHAPE = re.compile(r"# model=(.*) arch=(\S+) n_layer=(\d{1,4}) n_expert=(\d{1,5}) n_expert_used=(\d{1,5})")
_BYTES = re.compile(r"# layer=(\d{1,4}) expert_bytes=(\d{1,15})(?: .*)?")
PREFILL, DECODE = 0, 1  # of column phase


@dataclass(frozen=True, eq=False)
class LayerCall:
    """One layer ran for T tokens: ids int32 [T, K] by rank, with their weights f32 [T, K] where they are known. A prefill is one
    call per layer, of step 0."""

    layer: int
    ids: NDArray[np.int32]
    decode: bool
    turn: int = 0
    step: int = 0
    weights: NDArray[np.float32] | None = None


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
        lines = path.read_bytes().decode().splitlines()
    except (OSError, ValueError) as error:  # ValueError: no UTF-8, or NUL in the path
        raise TraceError(f"{path} can not be read as a route trace: {reason(error)}") from error
    if not lines or lines[0] != FIRST_LINE:
        raise TraceError(f"{path} is not a route trace: its first line is not {FIRST_LINE!r}")
    end = next((number for number, line in enumerate(lines) if not line.startswith("#")), len(lines))
    if end == len(lines) or lines[end] != COLUMNS:
        raise TraceError(f"{path}: line {end + 1} does not name the columns {COLUMNS}")
    model, shape, expert_bytes = _header(path, lines[1:end])
    calls = _calls(path, _tokens(path, lines, end + 1, shape))
    return RouteTrace(model, shape.layers, shape.experts, shape.top_k, expert_bytes, calls)


class _Shape(NamedTuple):
    layers: int
    experts: int
    top_k: int


def _header(path: Path, lines: list[str]) -> tuple[str, _Shape, tuple[int, ...]]:
    """Model, its shape, and the bytes of an expert of each layer."""
    found = [match for line in lines if (match := _SHAPE.fullmatch(line))]
    if len(found) != 1:
        raise TraceError(
            f"{path} has {len(found)} header lines with model, n_layer, n_expert and n_expert_used instead of one"
        )
    shape = _Shape(*(int(number) for number in found[0].groups()[2:]))
    if not (shape.layers and 1 <= shape.top_k <= shape.experts):
        raise TraceError(
            f"{path}: its header claims {shape.layers} layers, {shape.top_k} of {shape.experts} experts"
        )
    sizes = {int(match[1]): int(match[2]) for line in lines if (match := _BYTES.fullmatch(line))}
    expert_bytes = tuple(sizes.get(layer, 0) for layer in range(shape.layers))
    if not all(expert_bytes):
        raise TraceError(
            f"{path}: its header does not say how large an expert of layer {expert_bytes.index(0)} is"
        )
    return found[0][1], shape, expert_bytes


class _Place(NamedTuple):
    """Of one token in one layer; sorted, places are in the order in which the layers ran."""

    turn: int
    phase: int
    step: int
    layer: int


class _Token(NamedTuple):
    """The expert of each rank, -1 where no row gives one, and its weight."""

    experts: list[int]
    weights: list[float]


def _tokens(path: Path, lines: list[str], start: int, shape: _Shape) -> dict[_Place, _Token]:
    """All tokens, from the rows that begin at line `start`."""
    tokens: dict[_Place, _Token] = {}
    for number, line in enumerate(lines[start:], start + 1):
        cells = line.split(",")
        try:
            turn, phase, step, layer, rank, expert = map(int, cells[:6])
            weight = np.float32(cells[6])
        except (ValueError, IndexError):
            cells = []
        if len(cells) != COLUMNS.count(",") + 1 or not np.isfinite(weight):
            raise TraceError(f"{path}: line {number} is no row of {COLUMNS}")
        inside = 0 <= layer < shape.layers and 0 <= rank < shape.top_k and 0 <= expert < shape.experts
        if not (inside and turn >= 0 and phase in (PREFILL, DECODE) and step >= 0):
            raise TraceError(
                f"{path}: line {number} leaves the {shape.layers} layers, {shape.top_k} ranks and {shape.experts} "
                "experts of the header, or the phases 0 and 1"
            )
        place, top_k = _Place(turn, phase, step, layer), shape.top_k
        token = tokens.setdefault(place, _Token([-1] * top_k, [0.0] * top_k))
        if token.experts[rank] >= 0 or expert in token.experts:
            raise TraceError(f"{path}: line {number} repeats a rank or an expert of its token")
        token.experts[rank], token.weights[rank] = expert, float(weight)
    return tokens


def _calls(path: Path, tokens: dict[_Place, _Token]) -> tuple[LayerCall, ...]:
    """Tokens put together into layer calls: a prefill is one per turn and layer, decode one per step and layer."""
    calls: dict[_Place, list[_Token]] = defaultdict(list)
    layers: dict[_Place, set[int]] = defaultdict(set)  # of each decode step
    for place, token in sorted(tokens.items()):
        if -1 in token.experts:
            rank = token.experts.index(-1)
            raise TraceError(f"{path}: {_words(place)}, layer {place.layer} has no expert of rank {rank}")
        call = place if place.phase == DECODE else place._replace(step=0)
        calls[call].append(token)
        if place.phase == DECODE:
            layers[place._replace(layer=0)].add(place.layer)
    if not calls:
        raise TraceError(f"{path} records no token")
    every = set().union(*layers.values())
    for step, seen in layers.items():
        if seen != every:
            raise TraceError(
                f"{path}: {_words(step)} lacks layer {min(every - seen)}; the trace was cut short"
            )
    return tuple(
        LayerCall(
            layer=place.layer,
            ids=np.array([token.experts for token in rows], dtype=np.int32),
            decode=place.phase == DECODE,
            turn=place.turn,
            step=place.step,
            weights=np.array([token.weights for token in rows], dtype=np.float32),
        )
        for place, rows in sorted(calls.items())
    )


def _words(place: _Place) -> str:
    return f"turn {place.turn}, {'decode' if place.phase == DECODE else 'prefill'} step {place.step}"
