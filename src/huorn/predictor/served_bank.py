"""A released bank as an engine serves it: int8 heads in RAM, the token table in the file."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from huorn.checkpoint.reader import Checkpoint
from huorn.checkpoint.row_table import RowTable
from huorn.checkpoint.safetensors_file import SafetensorsFile
from huorn.errors import UsageError
from huorn.predictor.bank import open_bank
from huorn.predictor.bank_files.bank_loader import CONFIG, MODEL, to_int8
from huorn.predictor.bank_files.reference_scorer import Bank
from huorn.predictor.bank_files.spec import BankConfig, check_base
from huorn.predictor.base_model import base_model_shape
from huorn.predictor.native_scorer import BankShape, round_up

HORIZONS = (1, 4, 16)  # what the cache's values of a use are for (experts/foresight.py)
KEPT_ROWS = 4096  # 2 MB of the 256 numbers that profile huorn has
_NO_ROW = torch.empty(0, dtype=torch.bfloat16)


@dataclass(frozen=True, eq=False)
class ServedBank:
    """`tensors` as huorn.predictor.bank_files.int8_bank names them; a row of `token_table` is read when it is asked for."""

    folder: Path
    config: BankConfig
    tensors: dict[str, Tensor]
    token_table: RowTable

    @classmethod
    def open(cls, folder: Path, checkpoint: Checkpoint) -> ServedBank:
        """Reads a bank and sees that it was made for this model.

        Raises UsageError when it is damaged, of another model (with both fingerprints), without hidden states, or of other
        horizons than HORIZONS; CheckpointError when the model can not be read.
        """
        bank = open_bank(folder)
        try:
            check_base(bank.config, base_model_shape(checkpoint, str(checkpoint.directory), ""))
        except ValueError as error:
            raise UsageError(f"{folder} can not serve this model: {error}") from error
        if bank.config.heads.horizons != HORIZONS:
            raise UsageError(
                f"{folder} forecasts {bank.config.heads.horizons} tokens ahead; the engine uses {HORIZONS}"
            )
        file = SafetensorsFile(folder / MODEL)
        return cls(folder, bank.config, _int8(bank), RowTable(file, file.infos["token_table"]))


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


def served_bytes(folder: Path) -> int:
    """What the heads of a bank take in RAM, from its config.json. UsageError when it can not be read."""
    try:
        config = BankConfig.model_validate_json((folder / CONFIG).read_bytes())
    except (OSError, ValueError) as error:
        raise UsageError(f"{folder} is no expert-predictor bank: {str(error).splitlines()[0]}") from error
    base, heads = config.base_model, config.heads
    shape = BankShape(
        len(heads.layers), round_up(config.features.width(base)), heads.trunk, base.hidden_size, base.num_experts,
        len(heads.horizons),
    )  # fmt: skip
    heads_bytes = sum(prod(sizes) * dtype.itemsize for dtype, sizes in shape.tensors.values())
    return heads_bytes + shape.work_bytes + KEPT_ROWS * 2 * config.features.token_width


def _int8(bank: Bank) -> dict[str, Tensor]:
    """Head after head, since codes are made by way of F32: 40 heads of 6 MB would take 2 GB for a moment."""
    each = [
        to_int8(
            Bank(bank.config, {n: t[head : head + 1] for n, t in bank.tensors.items() if n != "token_table"})
        )
        for head in range(len(bank.config.heads.layers))
    ]
    return {name: torch.cat([one[name] for one in each]) for name in each[0]}
