"""The budget of a model against figures known of the 35B shape, and against what a small one really has."""

from __future__ import annotations

from math import prod
from pathlib import Path

import pytest

from huorn.checkpoint.reader import Checkpoint
from huorn.memory import (
    MemoryBudget,
    checkpoint_budget,
    format_bytes,
    memory_budget,
    resident_set_bytes,
)
from huorn.model.precision import Precision
from huorn.synth.presets import find_preset
from huorn.synth.synthesize import synthesize
from huorn.synth.tensors import text_tensors


def lines(budget: MemoryBudget) -> dict[str, int]:
    return {line.name: line.bytes for line in budget.lines}


@pytest.fixture(scope="module")
def large() -> MemoryBudget:
    config = find_preset("qwen3.5-35b-a3b-fp8").config
    sizes = {tensor.name: tensor.nbytes for tensor in text_tensors(config)}
    return memory_budget(sizes, config, 4096, Precision.BF16, program_bytes=1000)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    out = tmp_path_factory.mktemp("memory") / "model"
    synthesize("tiny-fp8", out, None, 0, lambda done, total: None)
    return Checkpoint.open(out)


def test_35b_shape(large: MemoryBudget) -> None:
    """Figures of checkpoint.md: what one decoded token reads of each group is all there is of it."""
    found = lines(large)
    for name, gigabytes in {
        "embedding": 1.017,
        "output head": 1.017,
        "linear attention": 1.01,
        "full attention": 0.27,
        "shared experts": 0.126,
        "routers and norms": 0.042,
        "routed experts": 32.2,
    }.items():
        assert found[name] / 1e9 == pytest.approx(gigabytes, rel=0.02), name
    assert found["keys and values of 4,096 tokens"] == 4096 * 20 * 1024
    assert found["delta-net state, 3 copies"] / 2**20 == pytest.approx(3 * 63, abs=1.5)


def test_experts_are_not_counted_as_resident(large: MemoryBudget) -> None:
    assert large.mapped_bytes == lines(large)["routed experts"]
    assert large.resident_bytes == sum(lines(large).values()) - large.mapped_bytes
    assert large.program_bytes == 1000
    rows = large.rows()
    assert rows[-1] == ("resident in all", format_bytes(large.resident_bytes), "in RAM")
    assert [row for row in rows if row[2] != "in RAM"] == [
        ("routed experts", "32.2 GB", "on disk, read when used")
    ]


def stored_bytes(checkpoint: Checkpoint) -> int:
    return sum(info.nbytes for name, info in checkpoint.infos.items() if not name.startswith("mtp."))


def weights(budget: MemoryBudget) -> int:
    """Bytes of all lines that are weights as stored."""
    other = ("Python", "keys", "delta-net", "work", "heap", "scales")
    return sum(count for name, count in lines(budget).items() if not name.startswith(other))


@pytest.mark.parametrize("resident", [True, False])
def test_stored_weights_of_a_checkpoint_are_all_in_it(small: Checkpoint, resident: bool) -> None:
    budget = checkpoint_budget(small, 100, Precision.BF16, resident)
    assert weights(budget) == stored_bytes(small)
    assert budget.mapped_bytes == (0 if resident else lines(budget)["routed experts"])
    scales = sum(
        4 * prod(info.shape) for name, info in small.infos.items() if ".experts." in name and name.endswith("_scale_inv")
        and not name.startswith("mtp.")
    )  # fmt: skip
    assert lines(budget).get("scales of routed experts", 0) == (0 if resident else scales)


def test_in_f32_all_weights_are_expanded(small: Checkpoint) -> None:
    stored, expanded = (
        checkpoint_budget(small, 100, precision, True) for precision in (Precision.BF16, Precision.F32)
    )
    experts = small.config.num_hidden_layers * small.config.num_experts * 3
    assert (
        lines(expanded)["routed experts"]
        == 4 * experts * small.config.moe_intermediate_size * small.config.hidden_size
    )
    assert lines(expanded)["embedding"] == 2 * lines(stored)["embedding"]  # BF16 in the file


def test_slots_are_a_line_of_their_own(small: Checkpoint) -> None:
    budget = checkpoint_budget(small, 100, Precision.BF16, False)
    assert budget.and_line("3 slots", 300).resident_bytes == budget.resident_bytes + 300


def test_the_int8_copy_stands_for_the_head(small: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huorn.model.tables.LARGE_BYTES", 0)
    two_pass, full = (
        checkpoint_budget(small, 100, Precision.BF16, True, lm_head=kind) for kind in ("two-pass", "full")
    )
    rows, width = small.config.vocab_size, small.config.hidden_size
    assert lines(two_pass)["output head"] == rows * width + -(-8 * rows // 4096) * 4096
    assert "embedding" not in lines(two_pass)
    assert lines(full)["embedding"] == lines(full)["output head"] == 2 * rows * width


def test_resident_set(tmp_path: Path) -> None:
    assert 50e6 < resident_set_bytes() < 50e9  # PyTorch is imported
    assert resident_set_bytes(tmp_path / "none") == 0


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 bytes"),
        (999, "999 bytes"),
        (20_480, "20.5 KB"),
        (66_000_000, "66.0 MB"),
        (3_470_000_000, "3.5 GB"),
    ],
)
def test_format_bytes(count: int, text: str) -> None:
    assert format_bytes(count) == text
