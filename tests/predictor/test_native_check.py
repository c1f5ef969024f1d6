"""The check of the native scorer lets through what is right on every instruction set, and nothing that is a little wrong."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from huorn.errors import UsageError
from huorn.kernels import isa
from huorn.predictor.bank_files.int8_bank import quantise
from huorn.predictor.native_scorer import NativeScorer
from huorn.predictor.release.native_check import check_native

HEADS, FEATURES, TRUNK, EXPERTS, HIDDEN, GROUPS = 3, 301, 128, 24, 200, 3


@pytest.fixture
def bank() -> tuple[dict[str, Tensor], Tensor, Tensor]:
    torch.manual_seed(0)
    found = {"a": torch.rand(HEADS, GROUPS) + 0.5, "b": torch.randn(HEADS, GROUPS)}
    for name, rows, cols in (
        ("in", TRUNK, FEATURES),
        ("out", GROUPS * EXPERTS + HIDDEN, TRUNK),
        ("router", EXPERTS, HIDDEN),
    ):
        found[f"w_{name}.codes"], found[f"w_{name}.scale"] = quantise(
            torch.randn(HEADS, rows, cols) / cols**0.5
        )
        found[f"b_{name}"] = torch.randn(HEADS, rows)
    return found, torch.randn(HEADS, FEATURES), torch.randn(HEADS, HIDDEN)


@pytest.mark.parametrize("name", isa.available())
def test_every_instruction_set_is_within_the_bound(
    name: str, bank: tuple[dict[str, Tensor], Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(isa, "chosen", lambda: name)
    assert 0.05 < check_native(*bank) <= 1.0


@pytest.mark.parametrize("what", ["scores", "trunk", "corrections", "forecast"])
def test_a_number_that_is_one_percent_off_is_found(
    what: str, bank: tuple[dict[str, Tensor], Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    score, stages = NativeScorer.score, NativeScorer.stages

    def wrong_score(self: NativeScorer, x: Tensor, base: Tensor) -> tuple[Tensor, Tensor]:
        z, p = score(self, x, base)
        z[1, 2, int(z[1, 2].abs().argmax())] *= 1.02
        return z, p

    def wrong_stages(self: NativeScorer, count: int) -> tuple[Tensor, ...]:
        found = [part.clone() for part in stages(self, count)]
        part = found[["trunk", "corrections", "forecast"].index(what)]
        part[2, int(part[2].abs().argmax())] *= 1.02
        return tuple(found)

    if what == "scores":
        monkeypatch.setattr(NativeScorer, "score", wrong_score)
    else:
        monkeypatch.setattr(NativeScorer, "stages", wrong_stages)
    with pytest.raises(UsageError, match="times further"):
        check_native(*bank)
