"""Forty synthetic layers stay alive: the residual neither dies nor explodes, experts are all used, memory decays."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from huorn.checkpoint.reader import Checkpoint
from huorn.model import moe
from huorn.model.load import load_decoder
from huorn.model.norm import RMSNorm
from huorn.model.precision import Precision
from huorn.model.state import DecodeState
from huorn.synth.synthesize import synthesize

LAYERS, TOKENS = 40, 200


class Recorded:
    """A norm that notes the RMS of what goes in: the residual stream at that point."""

    def __init__(self, norm: RMSNorm, seen: list[float]) -> None:
        self.norm, self.seen = norm, seen

    def __call__(self, x: Tensor) -> Tensor:
        self.seen.append(x.square().mean().sqrt().item())
        return self.norm(x)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    out = tmp_path_factory.mktemp("deep") / "model"
    synthesize("tiny-fp8", out, LAYERS, 0, lambda done, total: None)
    return Checkpoint.open(out)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Matrices are so small that threads only wait for each other: 183 s with two on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread")
def test_forty_layers(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    residual: list[float] = []
    chosen: list[Tensor] = []
    shares: list[Tensor] = []
    real_route = moe.route

    def route(logits: Tensor, top_k: int) -> moe.Routing:
        routing = real_route(logits, top_k)
        chosen.append(routing.ids)
        shares.append(routing.weights)
        return routing

    monkeypatch.setattr(moe, "route", route)
    decoder = load_decoder(checkpoint, Precision.F32)
    layers = [replace(layer, input_norm=Recorded(layer.input_norm, residual)) for layer in decoder.layers]
    decoder = replace(decoder, layers=layers, norm=Recorded(decoder.norm, residual))
    ids = torch.randint(checkpoint.config.vocab_size, (TOKENS,), generator=torch.Generator().manual_seed(1))
    state = DecodeState.new(checkpoint.config, TOKENS, Precision.F32)
    logits = decoder.forward(ids, state, all_logits=True)

    assert logits.isfinite().all()
    assert 1 < logits.std() < 6
    assert logits.argmax(-1).unique().numel() > TOKENS // 8  # not one token whatever was read
    assert len(residual) == LAYERS + 1
    assert min(residual) > 0.1
    assert max(residual) < 100
    assert residual[-1] > 1.5 * residual[0]  # layers do add something
    for ids in chosen:
        assert ids.unique().numel() >= checkpoint.config.num_experts // 2
    mean_top = torch.cat(shares)[:, 0].mean()
    assert 1.1 / checkpoint.config.num_experts_per_tok < mean_top < 0.9  # a preference, not a dictator


def test_decay_neither_vanishes_nor_freezes(checkpoint: Checkpoint) -> None:
    """Share of the memory that is left after one token, with the a-projection at rest, over all heads of all layers."""
    kept = []
    for layer, kind in enumerate(checkpoint.config.layer_types):
        if kind == "linear_attention":
            prefix = f"layers.{layer}.linear_attn."
            rate = checkpoint.tensor(prefix + "A_log").double().exp()
            step = torch.nn.functional.softplus(checkpoint.tensor(prefix + "dt_bias").double())
            kept.append((-rate * step).exp())
    half_life = torch.cat(kept).log().reciprocal() * -torch.tensor(2.0).log()
    assert half_life.min() > 0.2
    assert half_life.max() < 5_000
    assert 4 < half_life.median() < 60
