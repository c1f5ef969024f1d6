"""A training run on disk: run.json, the token table, and per head its state, its weights and its curve."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from huorn.errors import UsageError, first_problem, reason
from huorn.files import write_atomically, write_bytes_atomically
from huorn.predictor.bank_files.spec import BaseModelShape, FeatureContract

SCHEMA = "huorn predictor run v1"
RUN, TOKEN_TABLE = "run.json", "token_table.safetensors"
TRACES = "traces.json"  # where they were; not part of what a run is
TRUNKS = {"large": 512, "small": 128}  # units; 6.3 and 2.0 MB a head in int8 in the 35B shape
_METADATA, _DIGEST = "huorn", "sha256"
STATE, WEIGHTS = "state.safetensors", "head.safetensors"


class TrainSettings(BaseModel):
    """What decides the weights besides traces and features. `epochs` at most; `patience` epochs without a better validation loss
    end it; `forecast_weight` is the share of the hidden-state forecast in the loss. Each head is trained by one thread, so that
    the number of workers changes no bit."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    trunk: int
    horizons: tuple[int, ...] = (1, 4, 16)
    epochs: int = 6
    patience: int = 2
    batch: int = 1024
    learning_rate: float = 2e-3
    forecast_weight: float = 0.1
    seed: int = 0
    pool: int | None = None


class RunSpec(BaseModel):
    """run.json: everything that must be the same for a run to go on."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    schema_: str = SCHEMA
    base_model: BaseModelShape
    features: FeatureContract
    settings: TrainSettings
    traces: str  # sha256 of their manifest

    @property
    def digest(self) -> str:
        """sha256 of it."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()


def head_folder(run: Path, layer: int) -> Path:
    """Where the head of a layer is."""
    return run / f"head-{layer:02}"


def trained_layers(run: Path) -> list[int]:
    """Layers whose heads are finished, ascending."""
    return sorted(
        int(path.parent.name.removeprefix("head-"))
        for path in run.glob(f"head-*/{WEIGHTS}")
        if path.parent.name.removeprefix("head-").isdecimal()
    )


def open_run(run: Path, spec: RunSpec) -> None:
    """Writes run.json, or finds the same one there. UsageError when it is another run's, or the folder holds other things."""
    path = run / RUN
    if not path.exists():
        if run.exists() and (not run.is_dir() or any(run.iterdir())):
            raise UsageError(f"{run} is not empty and holds no {RUN}: name a new folder")
        try:
            run.mkdir(parents=True, exist_ok=True)
            write_bytes_atomically(path, (spec.model_dump_json(indent=1) + "\n").encode())
        except OSError as error:
            raise UsageError(f"{run} can not be written: {reason(error)}") from error
        return
    found = read_run(run)
    for name in RunSpec.model_fields:
        if getattr(found, name) != getattr(spec, name):
            raise UsageError(
                f"{run} holds a run with other {name}: name another folder, or go on with the same options"
            )


def remember_traces(run: Path, folder: Path) -> None:
    """Writes down where the traces of a run are. UsageError when the disk refuses."""
    try:
        write_atomically(run / TRACES, json.dumps({"folder": str(folder.resolve())}) + "\n")
    except OSError as error:
        raise UsageError(f"{run / TRACES} can not be written: {reason(error)}") from error


def remembered_traces(run: Path) -> Path:
    """UsageError when it is not known."""
    try:
        return Path(json.loads((run / TRACES).read_text(encoding="utf-8"))["folder"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{run} does not say where its traces are: give --traces") from error


def read_run(run: Path) -> RunSpec:
    """UsageError when `run` is no training run."""
    path = run / RUN
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        if value.get("schema_") != SCHEMA:
            raise UsageError(
                f"{path} has the schema {value.get('schema_')!r}, but this version reads {SCHEMA!r}"
            )
        return RunSpec.model_validate(value)
    except OSError as error:
        raise UsageError(f"{run} is no training run: {path} can not be read: {reason(error)}") from error
    except ValidationError as error:
        raise UsageError(f"{path} is damaged: {first_problem(error)}") from error
    except (ValueError, AttributeError, RecursionError) as error:
        raise UsageError(f"{path} is damaged: it is no JSON object of a run") from error


def read_token_table(run: Path) -> Tensor:
    """BF16 [rows, width]. UsageError when it is missing or damaged."""
    path = run / TOKEN_TABLE
    tensors, _ = read_tensors(path)
    if tensors.keys() != {"token_table"}:
        raise UsageError(f"{path} is damaged: it holds no token_table; delete the run and train it anew")
    return tensors["token_table"]


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """A safetensors file, whole or not at all. UsageError when the disk refuses.

    Metadata are one entry in JSON: the format keeps entries in no order, and equal content is to give equal files.
    """
    entry = {_METADATA: json.dumps(dict(metadata or {}) | {_DIGEST: _digest(tensors)}, sort_keys=True)}
    data = save({name: tensor.contiguous() for name, tensor in tensors.items()}, metadata=entry)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes_atomically(path, data)
    except OSError as error:
        raise UsageError(f"{path} can not be written: {reason(error)}") from error


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata. UsageError when the file is missing or damaged."""
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping
            metadata = dict(json.loads((file.metadata() or {}).get(_METADATA, "{}")))
    except (OSError, SafetensorError, ValueError, RecursionError, TypeError) as error:
        raise UsageError(f"{path} can not be read: {reason(error)}") from error
    if metadata.pop(_DIGEST, None) != _digest(tensors):
        raise UsageError(
            f"{path} is damaged: its checksum is not the one it says; delete it and train it anew"
        )
    return tensors, metadata


def _digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over names and bytes."""
    found = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        found.update(tensor.detach().contiguous().flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()
