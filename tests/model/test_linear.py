"""Linear and Embedding: stored weights give what expanded ones give, rounding happens where Precision says."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import huorn.model.linear as linear
from huorn.checkpoint.fp8 import quantize_fp8
from huorn.checkpoint.weight import Weight
from huorn.model.linear import Embedding, Linear, row_chunks
from huorn.model.precision import Precision

GENERATOR = torch.Generator().manual_seed(0)


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=GENERATOR)


def fp8(rows: int, columns: int) -> Weight:
    return Weight(*quantize_fp8(random(rows, columns)))


@pytest.mark.parametrize("rows", [1, 127, 128, 129, 700])
@pytest.mark.parametrize("precision", Precision)
def test_stored_equals_expanded(rows: int, precision: Precision, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = [fp8(rows, 150), Weight(random(3, 150).bfloat16()), Weight(random(rows, 150))]
    x = precision.operand(random(4, 150))
    expanded = Linear(weights, precision, expand=True)
    monkeypatch.setattr(linear, "CHUNK_BYTES", 256 * 150 * 4)
    stored = Linear(weights, precision, expand=False)
    assert expanded.outputs == stored.outputs == 2 * rows + 3
    exact = x.double() @ torch.cat([precision.matrix(weight) for weight in weights]).double().t()
    assert torch.allclose(expanded(x).double(), exact, atol=1e-4)
    assert torch.allclose(stored(x).double(), exact, atol=1e-4)


def test_row_chunks_are_small_and_cover_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "CHUNK_BYTES", 300 * 64 * 4)
    weight = fp8(700, 64)
    chunks = list(row_chunks(weight))
    assert [chunk.shape[0] for chunk in chunks] == [256, 256, 188]
    assert torch.equal(torch.cat([chunk.expand() for chunk in chunks]), weight.expand())


def test_bf16_rounds_operands_but_not_fp8_products() -> None:
    exact = random(5, 7)
    rounded = exact.bfloat16().float()
    assert not torch.equal(exact, rounded)
    assert torch.equal(Precision.BF16.operand(exact), rounded)
    assert torch.equal(Precision.F32.operand(exact), exact)
    assert torch.equal(Precision.BF16.matrix(Weight(exact)), rounded)
    assert torch.equal(Precision.F32.matrix(Weight(exact)), exact)
    weight = fp8(130, 140)
    assert not torch.equal(weight.expand(), weight.expand().bfloat16().float())
    assert torch.equal(Precision.BF16.matrix(weight), weight.expand())


def test_embedding_expands_only_the_rows_asked_for() -> None:
    table = random(20, 6).bfloat16()
    embedding = Embedding(Weight(table), Precision.F32)
    assert torch.equal(embedding(torch.tensor([3, 3, 19])), table[[3, 3, 19]].float())
    assert embedding.weight.data is table
