"""DecodeState: its size, and that a call which fails changes nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from huorn.checkpoint.reader import Checkpoint
from huorn.errors import CheckpointError, UsageError
from huorn.model.decoder import Decoder
from huorn.model.load import load_decoder
from huorn.model.moe import ExpandedExpert
from huorn.model.precision import Precision
from huorn.model.state import DecodeState, state_bytes

from .shapes import small_config


@pytest.mark.parametrize("precision", Precision)
def test_state_bytes_are_those_of_the_tensors(precision: Precision) -> None:
    config = small_config()
    state = DecodeState.new(config, 10, precision)
    kv = sum(layer.keys.nbytes + layer.values.nbytes for layer in state.kv)
    recurrent = sum(tensor.nbytes for tensor in state.conv + state.recurrent)
    assert state_bytes(config, 10, precision) == (kv, recurrent)
    assert all(tensor.dtype == torch.float32 for tensor in state.conv + state.recurrent)


def test_state_bytes_of_the_35b_shape() -> None:
    config = small_config(
        hidden_size=2048, num_hidden_layers=40, num_attention_heads=16, num_key_value_heads=2, head_dim=256,
        layer_types=tuple("full_attention" if n % 4 == 3 else "linear_attention" for n in range(40)),
        linear_num_key_heads=16, linear_num_value_heads=32, linear_key_head_dim=128, linear_value_head_dim=128,
        partial_rotary_factor=0.25,
    )  # fmt: skip
    kv, recurrent = state_bytes(config, 1000, Precision.BF16)
    assert kv == 1000 * 20 * 1024
    assert 62e6 < recurrent < 66e6


@pytest.mark.parametrize("context", [0, -1, 65])
def test_impossible_context(context: int) -> None:
    with pytest.raises(
        UsageError, match=rf"context of {context} tokens is not possible: this model takes 1 to 64"
    ):
        DecodeState.new(small_config(), context, Precision.F32)


@pytest.fixture(scope="module")
def decoder(tiny_model: Path) -> Decoder:
    return load_decoder(Checkpoint.open(tiny_model), Precision.F32)


def continues_as_before(decoder: Decoder, state: DecodeState, position: int) -> None:
    """The state goes on exactly like a fresh one that read the same 5 tokens."""
    assert state.position == position == 5
    fresh = DecodeState.new(decoder.config, state.context, Precision.F32)
    decoder.forward(torch.arange(5), fresh)
    assert torch.equal(decoder.forward(torch.tensor([7]), state), decoder.forward(torch.tensor([7]), fresh))


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (torch.arange(6), "11 tokens do not fit in a context of 10"),
        (torch.tensor([1, -1]), "token id -1 is not in the vocabulary: ids are 0 to 511"),
        (torch.tensor([1, 512]), "token id 512 is not in the vocabulary: ids are 0 to 511"),
        (torch.tensor([], dtype=torch.int64), "no tokens"),
    ],
)
def test_refused_tokens_change_nothing(decoder: Decoder, tokens: torch.Tensor, message: str) -> None:
    state = DecodeState.new(decoder.config, 10, Precision.F32)
    decoder.forward(torch.arange(5), state)
    tensors = [*state.conv, *state.recurrent, *(t for kv in state.kv for t in (kv.keys, kv.values))]
    before = [tensor.clone() for tensor in tensors]
    with pytest.raises(UsageError, match=message):
        decoder.forward(tokens, state)
    after = [*state.conv, *state.recurrent, *(t for kv in state.kv for t in (kv.keys, kv.values))]
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
    continues_as_before(decoder, state, 5)


def test_a_context_can_be_filled_to_the_last_token(decoder: Decoder) -> None:
    state = DecodeState.new(decoder.config, 6, Precision.F32)
    decoder.forward(torch.arange(5), state)
    decoder.forward(torch.tensor([5]), state)
    with pytest.raises(UsageError, match="7 tokens do not fit in a context of 6"):
        decoder.forward(torch.tensor([6]), state)


class FailsInLayer:
    """A provider that fails, as a damaged file or Ctrl-C would, when a layer asks for experts."""

    def __init__(self, failure: BaseException) -> None:
        self.failure = failure

    def ready(self, layer: int, expert_ids: Sequence[int]) -> Iterable[ExpandedExpert]:
        raise self.failure


@pytest.mark.parametrize("failure", [CheckpointError("damaged"), KeyboardInterrupt()])
@pytest.mark.parametrize("count", [1, 3])
def test_a_failure_on_the_way_changes_nothing(decoder: Decoder, failure: BaseException, count: int) -> None:
    last = decoder.layers[-1]
    broken_last = replace(last, moe=replace(last.moe, experts=FailsInLayer(failure)))
    broken = replace(decoder, layers=[*decoder.layers[:-1], broken_last])
    state = DecodeState.new(decoder.config, 20, Precision.F32)
    decoder.forward(torch.arange(5), state)
    with pytest.raises(type(failure)):
        broken.forward(torch.arange(count), state)
    continues_as_before(decoder, state, 5)
