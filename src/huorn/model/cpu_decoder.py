"""The decoder on native kernels: one call per block, and logits that depend on the token ids alone, to the bit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from huorn import _native
from huorn.checkpoint.config import ModelConfig
from huorn.checkpoint.row_table import RowTable
from huorn.checkpoint.weight import Weight
from huorn.kernels.operand import Operand
from huorn.model.cpu_experts import ExpertTable
from huorn.model.decoder import check_tokens
from huorn.model.head import Head
from huorn.model.next_token import NextToken
from huorn.model.precision import Precision
from huorn.model.rotary import Rotary
from huorn.model.state import DecodeState
from huorn.model.tables import LmHead
from huorn.model.tap import LayerTap
from huorn.schedule.plan import BUCKET_TOKENS, Plan
from huorn.schedule.shapes import columns

KERNEL_ROWS = 128  # kRows in native/shapes.h
MOST_COLUMNS = 128  # of any entry in schedule/shapes.py


@dataclass(frozen=True, eq=False)
class CpuLayer:
    """One decoder layer as the kernels take it."""

    mixer: _native.DeltaNet | _native.Attention
    router: _native.Router
    experts: _native.ExpertLayer


# (conv, recurrent) of each sequence
Spares = Sequence[tuple[tuple[Tensor, ...], tuple[Tensor, ...]]]


@dataclass(frozen=True, eq=False)
class Sequences:
    """Token ids int64 [t >= 1] of each sequence and the state they are appended to."""

    ids: Sequence[Tensor]
    states: Sequence[DecodeState]

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sequence."""
        return [len(ids) for ids in self.ids]


@dataclass(frozen=True, eq=False)
class KeptRows:
    """What each layer's router read (hidden f32 [L, T, D], behind the norm) and made (logits f32 [L, T, E], ids i32 [L, T, K])
    in the last forward; valid until the next."""

    hidden: Tensor
    logits: Tensor
    ids: Tensor


class Buffers:
    """What one forward needs besides weights and states, for up to `tokens` tokens; reused, since fresh memory of this size
    would be zeroed by the system for every layer (33 MB for 512 tokens of the 35B shape)."""

    def __init__(self, config: ModelConfig, tokens: int) -> None:
        hidden, top_k = config.hidden_size, config.num_experts_per_tok
        self.tokens = tokens
        self.x = torch.empty(tokens, hidden)
        self.normed = torch.empty(tokens, hidden)
        self.router_logits = torch.empty(tokens, config.num_experts)
        self.ids = torch.empty(tokens, top_k, dtype=torch.int32)
        self.weights = torch.empty(tokens, top_k)
        self.gate = torch.empty(tokens)
        self.pair_out = torch.empty(tokens * top_k, hidden)
        self.shared_out = torch.empty(tokens, hidden)
        # What a call of a few tokens leaves behind of each layer, and what each was said to route to one layer before.
        kept = config.num_hidden_layers * min(tokens, BUCKET_TOKENS - 1)
        self.routed, self.said = torch.empty(2, kept, top_k, dtype=torch.int32)
        self.kept_normed = torch.empty(kept, hidden)
        self.kept_logits = torch.empty(kept, config.num_experts)
        self.layers = config.num_hidden_layers

    def routing(self, tokens: int) -> Iterator[NDArray[Any]]:
        """Views of what the last router read and made: normed [T, D], logits [T, E], ids [T, K], weights [T, K]."""
        return (part[:tokens].numpy() for part in (self.normed, self.router_logits, self.ids, self.weights))

    def kept(self, tokens: int) -> KeptRows:
        """Views of what the last call, of a few tokens, left behind."""
        some = self.layers * tokens
        hidden, logits, ids = (
            part[:some].view(self.layers, tokens, -1)
            for part in (self.kept_normed, self.kept_logits, self.routed)
        )
        return KeptRows(hidden, logits, ids)

    def step(self, runtime: _native.Runtime, lengths: Sequence[int], wide: int) -> _native.Step:
        """A forward over sequences of these lengths in these buffers, at most `wide` columns per pass over a dense weight."""
        return _native.Step(
            runtime=runtime, x=self.x.data_ptr(), lengths=lengths, columns=wide, logits=self.router_logits.data_ptr(),
            normed=self.normed.data_ptr(), ids=self.ids.data_ptr(), weights=self.weights.data_ptr(),
            gate=self.gate.data_ptr(), pair_out=self.pair_out.data_ptr(), shared_out=self.shared_out.data_ptr(),
            routed=self.routed.data_ptr(), kept_normed=self.kept_normed.data_ptr(), kept_logits=self.kept_logits.data_ptr(),
        )  # fmt: skip


def work_bytes(config: ModelConfig, tokens: int, threads: int) -> int:
    """At most what a forward over `tokens` tokens takes besides weights and states: Buffers, what mixers and experts share
    between threads, and each thread's own columns."""
    hidden, top_k, experts = config.hidden_size, config.num_experts_per_tok, config.num_experts
    buffers = hidden * (3 + top_k) + experts + 4 * top_k
    kept = config.num_hidden_layers * min(tokens, BUCKET_TOKENS - 1) * (hidden + experts + 2 * top_k)
    values = config.linear_num_value_heads * config.linear_value_head_dim
    linear = config.conv_dim + 2 * values + 2 * config.linear_num_value_heads
    full = config.head_dim * (3 * config.num_attention_heads + 2 * config.num_key_value_heads)
    inner = top_k * config.moe_intermediate_size + config.shared_expert_intermediate_size
    widest = max(hidden, values, config.num_attention_heads * config.head_dim)
    own = 8 * widest + 8 * KERNEL_ROWS  # per column: packed in BF16 twice, normed in F32, sums of a unit
    logits = 8 * config.vocab_size  # and those of the step before
    return (
        4 * (kept + tokens * (buffers + max(linear, full, inner)))
        + threads * min(tokens, MOST_COLUMNS) * own
        + logits
    )


@dataclass(eq=False)
class CpuDecoder:
    """The whole model on the kernels. It holds no sequence; one forward at a time.

    `alive` are the tensors that the layers point into. With `quick_pairs` a few tokens on resident experts go through all layers
    in one kernel call, which makes their plans (Plan.per_pair) itself; not while a `tap` is set, which is told what every layer
    routes, with the same bits.
    """

    config: ModelConfig
    precision: Precision
    runtime: _native.Runtime
    embedding: Operand | RowTable
    layers: Sequence[CpuLayer]
    experts: ExpertTable
    head: Head
    rotary: Rotary
    alive: Sequence[object]
    quick_pairs: bool = True
    tap: LayerTap | None = None
    _buffers: Buffers | None = field(default=None, init=False)
    _kept: KeptRows | None = field(default=None, init=False)

    def forward(self, token_ids: Tensor, state: DecodeState, all_logits: bool = False) -> Tensor:
        """Appends T >= 1 tokens to the sequence in `state`.

        token_ids int64 [T] -> logits f32 [1, V] of the token after the last one, or [T, V] with all_logits. A function of
        the ids of the sequence alone: however it was cut into calls, the same bits. UsageError when a token id is not in
        the vocabulary or the tokens do not fit. Any failure leaves the state as it was.
        """
        return self.forward_batch(Sequences([token_ids], [state]), all_logits)[0]

    def forward_batch(self, sequences: Sequences, all_logits: bool = False) -> list[Tensor]:
        """`forward` for several sequences at once, each with its own state: weights are read once for all of them, and each
        gets the bits that it gets alone."""
        x, spares = self._run(sequences)
        logits = self._logits(x, sequences.lengths, all_logits)
        self._commit(sequences, spares)
        return logits

    @property
    def lm_head_kind(self) -> LmHead:
        """How next tokens are computed."""
        return self.head.kind

    def next_token(self, token_ids: Tensor, state: DecodeState) -> NextToken:
        """`forward` without logits: they are computed when they are asked for, as many as are asked for."""
        return self.next_tokens(Sequences([token_ids], [state]))[0]

    def next_tokens(self, sequences: Sequences) -> Sequence[NextToken]:
        """`next_token` for several sequences at once."""
        x, spares = self._run(sequences)
        tokens = self.head.next_tokens(self.runtime, _last(x, sequences.lengths).clone(), self._wide(len(x)))
        self._commit(sequences, spares)
        return tokens

    def kept_rows(self) -> KeptRows | None:
        """What the routers of the last forward, of one token, read and made; None when it was another kind of forward."""
        return self._kept

    def _run(self, sequences: Sequences) -> tuple[Tensor, Spares]:
        """All layers: x f32 [T, D] behind them, in the buffers, and what each state is to become."""
        for token_ids, state in zip(sequences.ids, sequences.states, strict=True):
            check_tokens(token_ids, state, self.config)
        all_ids = sequences.ids[0] if len(sequences.ids) == 1 else torch.cat(list(sequences.ids))
        tokens, spares = all_ids.shape[0], [state.spare() for state in sequences.states]
        buffers = self._room(tokens)
        step = buffers.step(self.runtime, sequences.lengths, self._wide(tokens))
        rotations = self._point_to_states(step, sequences, spares)

        self._embed(all_ids, buffers.x)
        self._kept = None
        quick = self.quick_pairs and self.experts.quick and self.tap is None
        if quick and tokens < BUCKET_TOKENS:
            self._run_few(step, buffers, tokens)
            self._kept = buffers.kept(tokens) if tokens == 1 else None
        else:
            self._run_layers(step, buffers, tokens)
        del rotations  # until here the step points to them
        return buffers.x[:tokens], spares

    def _commit(self, sequences: Sequences, spares: Spares) -> None:
        for length, state, (conv, recurrent) in zip(sequences.lengths, sequences.states, spares, strict=True):
            state.commit(length, zip(conv, recurrent, strict=True))

    def _embed(self, ids: Tensor, x: Tensor) -> None:
        """Writes the rows of ids int64 [T] to x f32 [>= T, D]."""
        table = self.embedding
        if isinstance(table, RowTable):
            rows = Weight(table.rows(ids), name=table.name)
            x[: len(ids)] = Operand.of(rows, self.precision is Precision.F32).data
            return
        self.runtime.embed(
            table.data.data_ptr(),
            table.format,
            self.config.hidden_size,
            ids.data_ptr(),
            len(ids),
            x.data_ptr(),
        )

    def _point_to_states(
        self,
        step: _native.Step,
        sequences: Sequences,
        spares: Spares,
    ) -> object:
        """Tells the step where each layer finds what sequences left behind, and puts what they leave; returns what must live
        as long as the step."""
        states, positions = sequences.states, [state.position for state in sequences.states]
        cosine, sine, alive = self.rotary.table(positions, sequences.lengths)
        step.linear_states(
            _addresses([state.conv for state in states]), _addresses([conv for conv, _ in spares]),
            _addresses([state.recurrent for state in states]), _addresses([recurrent for _, recurrent in spares]),
        )  # fmt: skip
        step.caches(
            _addresses([[kv.keys for kv in state.kv] for state in states]),
            _addresses([[kv.values for kv in state.kv] for state in states]),
            positions, cosine, sine,
        )  # fmt: skip
        return alive

    def _run_few(self, step: _native.Step, buffers: Buffers, tokens: int) -> None:
        """All layers on a few tokens: one kernel call, and another after each layer that lacks an expert."""
        top_k, count, start = self.config.num_experts_per_tok, len(self.layers), 0
        looks_ahead = self.experts.looks_ahead
        if looks_ahead:
            step.look_ahead(buffers.said.data_ptr())
        said = buffers.said[: count * tokens].numpy().reshape(count, tokens, top_k)
        while (stop := step.run(self.native_layers, start)) < count or not self.experts.resident:
            routed = buffers.routed[: count * tokens].numpy().reshape(count, tokens, top_k)
            for number in range(start, stop):
                self.experts.used(number, routed[number])
            if stop == count:
                return
            coming = said[stop] if looks_ahead and stop + 1 < count else None
            for _ in self.experts.waves(stop, routed[stop], coming):
                step.run_ready(self.native_layers, stop)
            start = stop + 1

    def _run_layers(self, step: _native.Step, buffers: Buffers, tokens: int) -> None:
        """All layers, each with a plan for what its router chose, which it leaves in the buffers."""
        hidden, logits, ids, weights = buffers.routing(tokens)
        linear = full = 0
        for number, layer in enumerate(self.layers):
            if isinstance(layer.mixer, _native.DeltaNet):
                step.delta_net(layer.mixer, layer.router, linear)
                linear += 1
            else:
                step.attention(layer.mixer, layer.router, full)
                full += 1
            if self.tap is not None:
                self.tap.layer(number, hidden, logits, ids, weights)
            self._run_experts(step, number, ids)

    def _run_experts(self, step: _native.Step, number: int, ids: NDArray[np.int32]) -> None:
        """x += routed experts + gated shared expert, those first that are ready. ids int32 [T, K] are the router's choice."""
        plan, experts, top_k = self.plan(ids), self.layers[number].experts, ids.shape[1]
        shared = True
        for ready in self.experts.waves(number, ids):
            if shared or ready:
                part = plan.only(ready)  # alive while the kernels read it
                step.run_plan(experts, *part.addresses, top_k, shared)
                shared = False
        step.combine(top_k, self.config.hidden_size)

    def plan(self, ids: NDArray[np.int32]) -> Plan:
        """The plan for the experts ids int32 [T, K] of one layer call."""
        return Plan.of(ids, columns("cpu", self.runtime.isa, "expert"))

    def _logits(self, x: Tensor, lengths: Sequence[int], all_logits: bool) -> list[Tensor]:
        """f32 [1 or t, V] for each sequence, of x f32 [T, D]."""
        if not all_logits:
            x, lengths = _last(x, lengths), [1] * len(lengths)
        return list(self.head.full(self.runtime, x, self._wide(len(x))).split(list(lengths)))

    def _wide(self, tokens: int) -> int:
        """Columns per pass over a dense weight."""
        return min(tokens, columns("cpu", self.runtime.isa, "dense"))

    @cached_property
    def native_layers(self) -> _native.Layers:
        """All layers for one kernel call."""
        layers = _native.Layers()
        for layer in self.layers:
            layers.add(layer.mixer, layer.router, layer.experts)
        return layers

    def _room(self, tokens: int) -> Buffers:
        if self._buffers is None or self._buffers.tokens < tokens:
            self._buffers = Buffers(self.config, tokens)
        return self._buffers


def _last(x: Tensor, lengths: Sequence[int]) -> Tensor:
    """Of x f32 [T, D] the row of each sequence's last token."""
    return x if len(lengths) == len(x) else x[torch.tensor(lengths).cumsum(0) - 1]


def _addresses(by_sequence: Sequence[Sequence[Tensor]]) -> list[int]:
    """Of tensors [sequence][layer], layer after layer."""
    return [tensor.data_ptr() for layer in zip(*by_sequence, strict=True) for tensor in layer]
