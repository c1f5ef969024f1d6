"""The warm start file: which experts a session found worth keeping, so that the next one can begin with them in slots."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from huorn.checkpoint.reader import Checkpoint
from huorn.checkpoint.shards import INDEX
from huorn.errors import CheckpointError, UsageError, first_problem, reason
from huorn.files import write_atomically

_LARGEST = 64 * 2**20  # bytes; 40 layers of 256 experts take 0.2 MB
_STRICT = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)
_WHAT_TO_DO = "delete it to start without, or give another file"


class Shard(BaseModel):
    """State of one file of weights: name, bytes, time of the last change in ns."""

    model_config = _STRICT
    name: str
    bytes: int
    mtime_ns: int


class CheckpointIdentity(BaseModel):
    """What a warm start file belongs to. `sha256` of the index, or of the header of a lone model.safetensors.

    Weights are not read (36 GB take half a minute), so a change that keeps size and time of a shard goes unnoticed; it costs
    hits, never correctness.
    """

    model_config = _STRICT
    layers: int
    experts: int
    sha256: str
    shards: tuple[Shard, ...]


class _WarmFile(BaseModel):
    model_config = _STRICT
    format: Literal["huorn warm start v1"] = "huorn warm start v1"
    checkpoint: CheckpointIdentity
    scores: tuple[tuple[Annotated[float, Field(ge=0)], ...], ...]


def checkpoint_identity(checkpoint: Checkpoint) -> CheckpointIdentity:
    """Of an open checkpoint. Raises CheckpointError when one of its files has gone meanwhile."""
    paths = sorted({info.file for info in checkpoint.infos.values()})
    index = checkpoint.directory / INDEX
    try:
        if index.exists():
            named_by = index.read_bytes()
        else:
            with paths[0].open("rb") as file:
                named_by = file.read(min(info.start for info in checkpoint.infos.values()))
        shards = tuple(
            Shard(name=path.name, bytes=path.stat().st_size, mtime_ns=path.stat().st_mtime_ns)
            for path in paths
        )
    except OSError as error:
        raise CheckpointError(f"{error.filename} can not be read any more: {reason(error)}") from error
    return CheckpointIdentity(
        layers=checkpoint.config.num_hidden_layers,
        experts=checkpoint.config.num_experts,
        sha256=hashlib.sha256(named_by).hexdigest(),
        shards=shards,
    )


def save_warm(path: Path, identity: CheckpointIdentity, scores: NDArray[np.float64]) -> None:
    """Writes float64 [layers, experts] `scores`, finite and >= 0, as JSON, whole or not at all.

    Raises UsageError when `path` can not be written.
    """
    assert scores.shape == (identity.layers, identity.experts)
    content = _WarmFile(checkpoint=identity, scores=tuple(map(tuple, scores.tolist())))
    try:
        write_atomically(path, content.model_dump_json() + "\n")
    except (OSError, ValueError) as error:
        raise UsageError(f"the warm start file {path} can not be written: {reason(error)}") from error


def load_warm(path: Path, identity: CheckpointIdentity) -> NDArray[np.float64]:
    """The scores that `save_warm` wrote, to the bit.

    Raises UsageError when the file is missing or damaged, or belongs to another checkpoint or another state of this one.
    """
    try:
        with path.open("rb") as file:
            raw = file.read(_LARGEST + 1)
    except (OSError, ValueError) as error:
        raise UsageError(f"the warm start file {path} can not be read: {reason(error)}") from error
    if len(raw) > _LARGEST:
        raise UsageError(f"{path} is larger than any warm start file; {_WHAT_TO_DO}")
    try:
        content = _WarmFile.model_validate_json(raw)
    except ValidationError as error:
        raise UsageError(
            f"{path} is damaged or no warm start file ({first_problem(error)}); {_WHAT_TO_DO}"
        ) from error
    _refuse_other(path, content.checkpoint, identity)
    if [len(row) for row in content.scores] != [identity.experts] * identity.layers:
        raise UsageError(
            f"{path} is damaged: its scores are not {identity.layers} x {identity.experts} numbers; {_WHAT_TO_DO}"
        )
    return np.array(content.scores, dtype=np.float64)


def _refuse_other(path: Path, written_for: CheckpointIdentity, opened: CheckpointIdentity) -> None:
    if written_for == opened:
        return
    before, now = ({shard.name: shard for shard in identity.shards} for identity in (written_for, opened))
    if written_for.sha256 == opened.sha256 and before.keys() == now.keys():
        changed = [name for name in now if now[name] != before[name]]
        if changed:
            raise UsageError(
                f"{path} belongs to another state of this checkpoint: {changed[0]} has changed since; {_WHAT_TO_DO}"
            )
    raise UsageError(f"{path} belongs to another checkpoint than the one opened; {_WHAT_TO_DO}")
