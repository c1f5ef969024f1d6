"""The training loop's parts: what a batch is, how the rate moves, what a state and an export hold."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel
from tokenizers.models import BPE
from torch import Tensor

from huorn.checkpoint.reader import Checkpoint
from huorn.model.load import load_decoder
from huorn.model.precision import Precision
from huorn.model.state import DecodeState
from training.export import Format, write_checkpoint
from training.measure import routing_figures
from training.model import Seedling, Shape, init_weights
from training.optim import Flat, orthogonalise, split_work
from training.train import (
    RANKS,
    SEQUENCE,
    SEQUENCES_PER_RANK,
    WARMUP,
    Shared,
    batch,
    learning_rate,
    load_state,
    save_state,
)


def test_rate_warms_up_and_ends_near_zero() -> None:
    shares = [learning_rate(step, 1000) for step in range(1, 1001)]
    assert shares[0] == pytest.approx(1 / WARMUP)
    assert max(shares) == shares[WARMUP]
    assert all(a >= b for a, b in zip(shares[WARMUP:], shares[WARMUP + 1 :], strict=False))
    assert 0 < shares[-1] < 0.002


def test_every_epoch_reads_every_window_once() -> None:
    windows = RANKS * SEQUENCES_PER_RANK * 5
    tokens = np.arange(windows * SEQUENCE + 1, dtype=np.uint32)
    for epoch in range(2):
        steps = range(epoch * 5 + 1, epoch * 5 + 6)
        starts = []
        for step in steps:
            for rank in range(RANKS):
                inputs, targets = batch(tokens, step, rank)
                assert torch.equal(inputs[:, 1:], targets[:, :-1])
                starts += inputs[:, 0].tolist()
        assert sorted(starts) == [n * SEQUENCE for n in range(windows)]


@pytest.mark.parametrize("size", [(3, 64, 256), (2, 256, 64)])
def test_orthogonalise_brings_singular_values_near_one(size: tuple[int, int, int]) -> None:
    matrices = torch.randn(*size, generator=torch.Generator().manual_seed(0)) * 0.01
    values = torch.linalg.svdvals(orthogonalise(matrices.bfloat16()).float())
    assert values.min() > 0.5
    assert values.max() < 1.3


def test_ranks_share_all_weights_about_evenly() -> None:
    shapes = {name: tensor.shape for name, tensor in init_weights(Shape(), 0).items()}
    first, second = split_work(shapes, 2)
    assert sorted(first + second) == sorted(shapes)
    sizes = [sum(shapes[name].numel() for name in share) for share in (first, second)]
    assert max(sizes) < 1.05 * min(sizes)


def test_saved_state_comes_back(tmp_path: Path) -> None:
    shared = Shared(torch.arange(5.0), torch.arange(5.0) + 1, torch.arange(5.0) + 2, ())
    save_state(tmp_path / "state.safetensors", shared, 7, 12.5)
    empty = Shared(torch.zeros(5), torch.zeros(5), torch.zeros(5), ())
    assert load_state(tmp_path / "state.safetensors", empty) == (7, 12.5)
    for name in ("weights", "first", "second"):
        assert torch.equal(getattr(empty, name), getattr(shared, name))


def test_routing_figures_by_hand() -> None:
    ids = torch.tensor([[0, 1], [1, 2], [1, 2], [0, 1]])  # two sequences of two tokens, 8 experts
    figures = routing_figures([ids], 8, 2)
    assert figures.overlap == pytest.approx((1 + 1) / 2 / 2)
    assert figures.hottest_quarter == pytest.approx((4 + 2) / 8)
    assert figures.dead == 5


@pytest.fixture(scope="module")
def weights() -> dict[str, Tensor]:
    """Initial weights with the zero matrices made random, so that every part of the model shows in the logits."""
    generator = torch.Generator().manual_seed(1)
    return {
        name: torch.randn(tensor.shape, generator=generator) * 0.05 if tensor.abs().max() == 0 else tensor
        for name, tensor in init_weights(Shape(), 0).items()
    }


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    made = Tokenizer(BPE())
    made.decoder = ByteLevel()
    made.add_special_tokens([AddedToken(text, special=True) for text in ("<|endoftext|>", "<|im_end|>")])
    made.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def logits_of(folder: Path, ids: Tensor) -> Tensor:
    decoder = load_decoder(Checkpoint.open(folder), Precision.F32)
    state = DecodeState.new(decoder.config, len(ids), Precision.F32)
    return decoder.forward(ids, state, all_logits=True)


IDS = torch.randint(0, 4096, (70,), generator=torch.Generator().manual_seed(2))


def test_f32_export_gives_transformers_the_same_logits(
    weights: dict[str, Tensor], tokenizer: Path, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    write_checkpoint(weights, tokenizer, tmp_path / "f32", Format.F32)
    model = transformers.Qwen3_5MoeForCausalLM.from_pretrained(tmp_path / "f32", dtype=torch.float32)
    with torch.no_grad():
        want = model(IDS[None]).logits[0]
    got = logits_of(tmp_path / "f32", IDS)
    assert (got - want).abs().max() / want.abs().max() < 2e-5


def test_training_forward_is_the_released_model(
    weights: dict[str, Tensor], tokenizer: Path, tmp_path: Path
) -> None:
    write_checkpoint(weights, tokenizer, tmp_path / "f32", Format.F32)
    want = torch.nn.functional.cross_entropy(logits_of(tmp_path / "f32", IDS[:-1]), IDS[1:])
    with torch.no_grad():
        loss, _ = Seedling(Shape(), weights).loss(IDS[None, :-1], IDS[None, 1:])
    assert float(loss) == pytest.approx(float(want), rel=2e-3)  # BF16 matmuls against F32


def test_fp8_export_is_close_to_the_weights(
    weights: dict[str, Tensor], tokenizer: Path, tmp_path: Path
) -> None:
    write_checkpoint(weights, tokenizer, tmp_path / "fp8", Format.FP8)
    write_checkpoint(weights, tokenizer, tmp_path / "f32", Format.F32)
    checkpoint = Checkpoint.open(tmp_path / "fp8")
    assert checkpoint.config.fp8
    assert checkpoint.layout.prefix == "model.language_model."
    gate = checkpoint.expert(2, 63).gate.expand()
    want = weights["layers.2.mlp.experts.gate_up_proj"][63, :64]
    assert (gate - want).norm() / want.norm() < 0.03  # 3 bits of mantissa: 2^-4 at most, 2.6 % on average
    size = (tmp_path / "fp8" / "model.safetensors").stat().st_size
    assert size <= 35e6


def test_flat_views_are_the_buffer() -> None:
    flat = Flat({"a": torch.Size([2, 3]), "b": torch.Size([4])})
    flat.views["b"].fill_(2.0)
    assert flat.buffer.tolist() == [0.0] * 6 + [2.0] * 4
