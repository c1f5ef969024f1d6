"""A released bank as an engine serves it: int8 heads in RAM, the token table in the file."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from pydantic import ValidationError
from torch import Tensor

from huorn.checkpoint.reader import Checkpoint
from huorn.checkpoint.row_table import RowTable
from huorn.checkpoint.safetensors_file import SafetensorsFile
from huorn.errors import CheckpointError, UsageError, first_problem, reason
from huorn.kernels.huge_pages import HugePages, padded
from huorn.predictor.bank_files.bank_loader import CONFIG, MODEL, tensor_shapes, to_int8
from huorn.predictor.bank_files.reference_scorer import Bank
from huorn.predictor.bank_files.spec import BankConfig, check_base
from huorn.predictor.native_scorer import BankShape, round_up
from huorn.predictor.released import base_model_shape

HORIZONS = (1, 4, 16)  # what the cache's values of a use are for (experts/foresight.py)
KEPT_ROWS = 4096  # of the token table: 2 MB of the 256 numbers that profile huorn has
_NO_ROW = torch.empty(0, dtype=torch.bfloat16)


@dataclass(frozen=True, eq=False)
class ServedBank:
    """`tensors` as huorn.predictor.bank_files.int8_bank names them; a row of `token_table` is read when it is asked for."""

    config: BankConfig
    tensors: dict[str, Tensor]
    token_table: RowTable

    @classmethod
    def open(cls, folder: Path, checkpoint: Checkpoint) -> ServedBank:
        """Reads a bank, head after head, and sees that it was made for this model.

        Raises UsageError when it is damaged, of another model (with both fingerprints), or of other horizons than HORIZONS;
        CheckpointError when the model can not be read.
        """
        config = read_bank_config(folder)
        try:
            check_base(config, base_model_shape(checkpoint, str(checkpoint.directory), ""))
        except ValueError as error:
            raise UsageError(f"{folder} can not serve this model: {error}") from error
        if config.heads.horizons != HORIZONS:
            raise UsageError(
                f"{folder} forecasts {list(config.heads.horizons)} tokens ahead; the engine uses {list(HORIZONS)}"
            )
        try:
            file = SafetensorsFile(folder / MODEL)
            return cls(config, _heads(config, file), RowTable(file, file.infos["token_table"]))
        except CheckpointError as error:
            raise UsageError(f"{folder} can not be used: {error}") from error


class TokenRows:
    """Rows of a bank's token table, those of the last few thousand ids kept: a row from disk takes longer than all features."""

    def __init__(self, table: RowTable) -> None:
        self._table = table
        self._rows: dict[int, Tensor] = {}

    def of(self, token_id: int) -> Tensor | None:
        """BF16 [W]; None for an id that has no row in a table that has any. CheckpointError when it can not be read."""
        row = self._rows.get(token_id)
        if row is not None:
            return row
        if not self._table.shape[1]:
            return _NO_ROW
        if token_id >= self._table.shape[0]:
            return None
        if len(self._rows) >= KEPT_ROWS:
            self._rows.clear()
        row = self._rows[token_id] = self._table.rows(torch.tensor([token_id]))[0]
        return row


def read_bank_config(folder: Path) -> BankConfig:
    """config.json of a bank. UsageError when there is none, or it is damaged."""
    path = folder / CONFIG
    try:
        return BankConfig.model_validate_json(path.read_bytes())
    except OSError as error:
        raise UsageError(f"{folder} is no expert-predictor bank: {reason(error)}") from error
    except ValidationError as error:
        raise UsageError(f"{path} is damaged or of another kind: {first_problem(error)}") from error


def served_bytes(config: BankConfig) -> int:
    """At most what a bank takes in RAM when it is served."""
    shape = _shape(config)
    heads = sum(padded(prod(sizes) * dtype.itemsize) for dtype, sizes in shape.tensors.values())
    return heads + shape.work_bytes + KEPT_ROWS * 2 * config.features.token_width


def _shape(config: BankConfig) -> BankShape:
    base, heads = config.base_model, config.heads
    return BankShape(
        len(heads.layers), round_up(config.features.width(base)), heads.trunk, base.hidden_size, base.num_experts,
        len(heads.horizons),
    )  # fmt: skip


def _heads(config: BankConfig, file: SafetensorsFile) -> dict[str, Tensor]:
    """The int8 bank, in memory that lies as kernels like it. One head is expanded at a time: 40 of 6 MB take 1 GB in F32.

    CheckpointError when a tensor is not what config.json says, or not finite."""
    wanted = tensor_shapes(config)
    for name in sorted(wanted.keys() ^ file.infos.keys()):
        raise CheckpointError(f"{file.path} {'lacks' if name in wanted else 'has an unknown'} tensor {name}")
    for name, (sizes, dtype) in wanted.items():
        have = file.infos[name]
        if have.shape != sizes or have.dtype != {torch.bfloat16: "BF16", torch.float32: "F32"}[dtype]:
            raise CheckpointError(
                f"{file.path}: {name} is {list(have.shape)} {have.dtype}, but {CONFIG} says {list(sizes)} {dtype}"
            )
    table, count = _shape(config).tensors, len(config.heads.layers)
    room = HugePages(sum(padded(prod(sizes) * dtype.itemsize) for dtype, sizes in table.values()))
    found = {
        name: room.take(prod(sizes) * dtype.itemsize).view(dtype).view(sizes)
        for name, (dtype, sizes) in table.items()
    }
    for head in range(count):
        one = {
            name: file.read(name, part=head, parts=count)[None] if count > 1 else file.read(name)
            for name in wanted
            if name != "token_table"
        }
        for name, tensor in one.items():
            if not bool(tensor.isfinite().all()):
                raise CheckpointError(f"{file.path}: {name} holds NaN or infinity")
        for name, part in to_int8(Bank(config, one)).items():
            found[name][head] = part[0]
    return found
