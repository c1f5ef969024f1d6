"""An FP8 checkpoint in the official layout, against transformers in F32 holding its exact F32 expansion."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from torch import Tensor

from huorn.checkpoint.reader import Checkpoint
from huorn.errors import CheckpointError
from huorn.model.load import load_decoder
from huorn.model.precision import Precision
from huorn.model.state import DecodeState

from .fp8_checkpoint import write_fp8_checkpoint
from .oracle import (
    FULL,
    LINEAR,
    Case,
    difference,
    oracle_logits,
    random_model,
    random_tokens,
    run_pieces,
    token_errors,
)

# Every FP8 matrix has more than one block and a ragged edge.
CASE = Case(
    "fp8-ragged",
    7,
    {
        "vocab_size": 300,
        "hidden_size": 200,
        "layer_types": [LINEAR, FULL, LINEAR],
        "head_dim": 40,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 33,
        "linear_value_head_dim": 35,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 150,
        "shared_expert_intermediate_size": 131,
    },
)
TOKENS = 90


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tensor, Tensor]:
    """The checkpoint, tokens, and the oracle's logits for them."""
    model, directory = random_model(CASE), tmp_path_factory.mktemp("fp8")
    write_fp8_checkpoint(model, directory)
    tokens = random_tokens(CASE, TOKENS)
    return directory, tokens, oracle_logits(model, tokens)


@pytest.mark.parametrize("expand_limit_bytes", [0, 1 << 30])
@pytest.mark.parametrize("lengths", [[TOKENS], [2, 70, *[1] * 18]], ids=["one-shot", "pieces"])
def test_f32(written: tuple[Path, Tensor, Tensor], expand_limit_bytes: int, lengths: list[int]) -> None:
    directory, tokens, reference = written
    decoder = load_decoder(Checkpoint.open(directory), Precision.F32, expand_limit_bytes)
    assert difference(run_pieces(decoder, tokens, lengths), reference) <= 2e-5


def test_bf16_error_is_at_most_that_of_transformers(
    written: tuple[Path, Tensor, Tensor],
) -> None:
    directory, tokens, reference = written
    model = random_model(CASE)
    with tempfile.TemporaryDirectory() as scratch:
        write_fp8_checkpoint(model, Path(scratch))  # makes model the F32 expansion
    theirs = token_errors(oracle_logits(model.to(torch.bfloat16), tokens), reference)
    decoder = load_decoder(Checkpoint.open(directory), Precision.BF16)
    ours = token_errors(run_pieces(decoder, tokens, [TOKENS]), reference)
    assert ours.mean() <= theirs.mean()
    assert 0 < ours.median() <= theirs.median()


def test_nan_code_in_an_expert_ends_the_call_and_changes_nothing(
    written: tuple[Path, Tensor, Tensor], tmp_path: Path
) -> None:
    directory, tokens, _ = written
    damaged = shutil.copytree(directory, tmp_path / "damaged")
    decoder = load_decoder(Checkpoint.open(damaged), Precision.F32, expand_limit_bytes=0)
    state = DecodeState.new(decoder.config, TOKENS, Precision.F32)
    decoder.forward(tokens[:10], state)
    position, conv, recurrent = state.position, state.conv, state.recurrent

    for expert in range(decoder.config.num_experts):
        info = Checkpoint.open(damaged).infos[
            f"model.language_model.layers.2.mlp.experts.{expert}.up_proj.weight"
        ]
        with info.file.open("r+b") as file:
            file.seek(info.start + info.nbytes - 1)
            file.write(b"\xff")
    with pytest.raises(CheckpointError, match=r"layers\.2\.mlp\.experts\.\d+\.up_proj\.weight"):
        decoder.forward(tokens[10:20], state)
    assert state.position == position
    assert all(a is b for a, b in zip(state.conv + state.recurrent, conv + recurrent, strict=True))


def test_nan_code_in_an_expert_ends_loading(written: tuple[Path, Tensor, Tensor], tmp_path: Path) -> None:
    damaged = shutil.copytree(written[0], tmp_path / "damaged")
    info = Checkpoint.open(damaged).infos["model.language_model.layers.1.mlp.experts.5.down_proj.weight"]
    with info.file.open("r+b") as file:
        file.seek(info.start)
        file.write(b"\x7f")
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.experts\.5\.down_proj\.weight"):
        load_decoder(Checkpoint.open(damaged))
