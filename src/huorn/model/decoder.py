"""The decoder: embedding, layers, final norm, logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from huorn.checkpoint.config import ModelConfig
from huorn.errors import UsageError
from huorn.model.attention import GatedAttention
from huorn.model.delta_net import GatedDeltaNet
from huorn.model.linear import Embedding, Linear
from huorn.model.moe import MoeBlock
from huorn.model.next_token import FullLogits, NextToken
from huorn.model.norm import RMSNorm
from huorn.model.precision import Precision
from huorn.model.rotary import Rotary
from huorn.model.state import DecodeState
from huorn.model.tables import LmHead


@dataclass(frozen=True, eq=False)
class DecoderLayer:
    """x + mixer(norm x), then x + moe(norm x)."""

    input_norm: RMSNorm
    mixer: GatedAttention | GatedDeltaNet
    post_attention_norm: RMSNorm
    moe: MoeBlock


@dataclass(frozen=True, eq=False)
class Decoder:
    """The whole model. It holds no sequence: everything about one is in its DecodeState."""

    config: ModelConfig
    precision: Precision
    embed: Embedding
    layers: Sequence[DecoderLayer]
    norm: RMSNorm
    lm_head: Linear
    rotary: Rotary
    lm_head_kind: LmHead = field(default="full", init=False)

    @torch.inference_mode()
    def forward(self, token_ids: Tensor, state: DecodeState, all_logits: bool = False) -> Tensor:
        """Appends T >= 1 tokens to the sequence in `state`.

        token_ids int64 [T] -> logits f32 [1, V] of the token after the last one, or [T, V] with all_logits.
        However a prompt is cut into calls, the logits agree within F32 rounding. UsageError when a token id is not
        in the vocabulary or the tokens do not fit. Any failure leaves the state as it was.
        """
        tokens = check_tokens(token_ids, state, self.config)
        rotation = self.rotary.at(state.position, tokens)
        kv, before = iter(state.kv), zip(state.conv, state.recurrent, strict=True)
        after: list[tuple[Tensor, Tensor]] = []

        x = self.embed(token_ids)
        for layer in self.layers:
            operand = self.precision.operand(layer.input_norm(x))
            if isinstance(layer.mixer, GatedDeltaNet):
                mixed, conv, recurrent = layer.mixer(operand, *next(before))
                after.append((conv, recurrent))
            else:
                mixed = layer.mixer(operand, rotation, next(kv), state.position)
            x = x + mixed
            x = x + layer.moe(self.precision.operand(layer.post_attention_norm(x)))
        logits = self.lm_head(self.precision.operand(self.norm(x if all_logits else x[-1:])))

        state.commit(tokens, after)
        return logits

    def next_token(self, token_ids: Tensor, state: DecodeState) -> NextToken:
        """`forward` for the token after the last one."""
        return FullLogits.of(self.forward(token_ids, state)[0])


def check_tokens(token_ids: Tensor, state: DecodeState, config: ModelConfig) -> int:
    """The number of tokens, all of which can be appended to the state. UsageError otherwise."""
    tokens = token_ids.shape[0]
    if tokens == 0:
        raise UsageError("there are no tokens to decode: give a prompt of at least one token")
    state.check_room(tokens)
    few = token_ids.tolist() if tokens < 8 else [int(bound) for bound in token_ids.aminmax()]
    lowest, highest = min(few), max(few)
    if lowest < 0 or highest >= config.vocab_size:
        wrong, last = lowest if lowest < 0 else highest, config.vocab_size - 1
        raise UsageError(f"token id {wrong} is not in the vocabulary: ids are 0 to {last}")
    return tokens
