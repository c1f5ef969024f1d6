"""Rows read from a file as they are asked for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from huorn.checkpoint import row_table
from huorn.checkpoint.row_table import RowTable
from huorn.checkpoint.safetensors_file import SafetensorsFile
from huorn.errors import CheckpointError


def saved(folder: Path, dtype: torch.dtype = torch.bfloat16) -> tuple[RowTable, Tensor]:
    weight = torch.randn(1000, 24, generator=torch.Generator().manual_seed(1)).to(dtype)
    save_file({"odd": torch.zeros(3), "table": weight}, folder / "model.safetensors")
    file = SafetensorsFile(folder / "model.safetensors")
    return RowTable(file, file.infos["table"]), weight


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "ids", [[0], [999], [3, 4, 5], [0, 2, 3, 4, 9, 998, 999], [7, 7], [5, 3, 900, 3, 4], list(range(1000))]
)
def test_rows(tmp_path: Path, dtype: torch.dtype, ids: list[int]) -> None:
    table, weight = saved(tmp_path, dtype)
    found = table.rows(torch.tensor(ids))
    assert found.dtype == dtype
    assert torch.equal(found, weight[ids])


def test_neighbours_are_one_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table, _ = saved(tmp_path)
    reads, read_into = list[int](), SafetensorsFile.read_into

    def counted(file: SafetensorsFile, target: memoryview, start: int, what: str) -> None:
        reads.append(len(target))
        read_into(file, target, start, what)

    monkeypatch.setattr(SafetensorsFile, "read_into", counted)
    table.rows(torch.tensor([2, 3, 4, 10, 12, 13]))
    assert reads == [3 * 48, 48, 2 * 48]


@pytest.mark.parametrize("piece_bytes", [1, 48, 1000, 1 << 20])
def test_pieces_are_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece_bytes: int) -> None:
    table, weight = saved(tmp_path)
    monkeypatch.setattr(row_table, "PIECE_BYTES", piece_bytes)
    at = 0
    for first, piece in table.pieces():
        assert first == at
        assert torch.equal(piece, weight[at : at + len(piece)])
        assert piece.nbytes <= max(48, piece_bytes)
        at += len(piece)
    assert at == 1000


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_damaged_rows_are_refused_by_name(tmp_path: Path, bad: float) -> None:
    table, weight = saved(tmp_path)
    weight[500, 3] = bad
    save_file({"odd": torch.zeros(3), "table": weight}, tmp_path / "model.safetensors")
    file = SafetensorsFile(tmp_path / "model.safetensors")
    table = RowTable(file, file.infos["table"])
    table.rows(torch.tensor([499, 501]))
    with pytest.raises(CheckpointError, match=r"table holds NaN or infinity"):
        table.rows(torch.tensor([499, 500]))


def test_a_truncated_file(tmp_path: Path) -> None:
    table, _ = saved(tmp_path)
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.truncate(2000)
    with pytest.raises(CheckpointError, match=r"inside table; it was truncated"):
        table.rows(torch.tensor([1, 999]))
    with pytest.raises(CheckpointError, match=r"inside table; it was truncated"):
        list(table.pieces())
