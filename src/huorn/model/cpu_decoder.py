"""The decoder on native kernels: one call per block, and logits that depend on the token ids alone, to the bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from huorn import _native
from huorn.checkpoint.config import ModelConfig
from huorn.kernels.operand import Operand
from huorn.model.cpu_experts import ExpertTable
from huorn.model.decoder import check_tokens
from huorn.model.precision import Precision
from huorn.model.rotary import Rotary
from huorn.model.state import DecodeState
from huorn.schedule.plan import Plan
from huorn.schedule.shapes import columns


@dataclass(frozen=True, eq=False)
class CpuLayer:
    """One decoder layer as the kernels take it."""

    mixer: _native.DeltaNet | _native.Attention
    router: _native.Router
    experts: _native.ExpertLayer


@dataclass(frozen=True, eq=False)
class Sequences:
    """Token ids int64 [t >= 1] of each sequence and the state they are appended to."""

    ids: Sequence[Tensor]
    states: Sequence[DecodeState]

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sequence."""
        return [len(ids) for ids in self.ids]


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


@dataclass(eq=False)
class CpuDecoder:
    """The whole model on the kernels. It holds no sequence; one forward at a time.

    `alive` are the tensors that the layers point into.
    """

    config: ModelConfig
    precision: Precision
    runtime: _native.Runtime
    embedding: Operand
    layers: Sequence[CpuLayer]
    experts: ExpertTable
    norm_scale: Tensor
    lm_head: Operand
    rotary: Rotary
    alive: Sequence[object]
    _buffers: Buffers | None = field(default=None, init=False)

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
        for ids, state in zip(sequences.ids, sequences.states, strict=True):
            check_tokens(ids, state, self.config)
        all_ids = torch.cat(list(sequences.ids))
        tokens, spares = all_ids.shape[0], [state.spare() for state in sequences.states]
        buffers, wide = self._room(tokens), columns("cpu", self.runtime.isa, "dense")
        wide = min(wide, tokens)
        x = buffers.x.data_ptr()

        table = self.embedding
        self.runtime.embed(
            table.data.data_ptr(), table.format, self.config.hidden_size, all_ids.data_ptr(), tokens, x
        )
        self._layers(sequences, spares, buffers, tokens, wide)
        logits = self._logits(sequences, buffers, all_logits, wide)
        for length, state, (conv, recurrent) in zip(sequences.lengths, sequences.states, spares, strict=True):
            state.commit(length, zip(conv, recurrent, strict=True))
        return logits

    def _layers(
        self,
        sequences: Sequences,
        spares: Sequence[tuple[tuple[Tensor, ...], tuple[Tensor, ...]]],
        buffers: Buffers,
        tokens: int,
        wide: int,
    ) -> None:
        """All layers, in place on buffers.x."""
        lengths, states = sequences.lengths, sequences.states
        positions = [state.position for state in states]
        cosine, sine = self.rotary.table(positions, lengths)
        x, linear, full = buffers.x.data_ptr(), 0, 0
        for number, layer in enumerate(self.layers):
            if isinstance(layer.mixer, _native.DeltaNet):
                self.runtime.delta_net(
                    layer.mixer, x, lengths, wide,
                    [state.conv[linear].data_ptr() for state in states],
                    [conv[linear].data_ptr() for conv, _ in spares],
                    [state.recurrent[linear].data_ptr() for state in states],
                    [recurrent[linear].data_ptr() for _, recurrent in spares],
                )  # fmt: skip
                linear += 1
            else:
                self.runtime.attention(
                    layer.mixer, x, lengths, wide,
                    [state.kv[full].keys.data_ptr() for state in states],
                    [state.kv[full].values.data_ptr() for state in states],
                    positions, cosine.data_ptr(), sine.data_ptr(),
                )  # fmt: skip
                full += 1
            self._moe(number, layer, buffers, tokens, wide)

    def _moe(self, number: int, layer: CpuLayer, buffers: Buffers, tokens: int, wide: int) -> None:
        """x += routed experts + gated shared expert, in place on buffers.x."""
        x, top_k = buffers.x.data_ptr(), self.config.num_experts_per_tok
        self.runtime.route(
            layer.router, x, tokens, wide, buffers.router_logits.data_ptr(), buffers.normed.data_ptr(),
            buffers.ids.data_ptr(), buffers.weights.data_ptr(), buffers.gate.data_ptr(),
        )  # fmt: skip
        plan = self.plan(buffers.ids[:tokens].numpy())
        self.experts.ready(number, plan.active.tolist())
        self.runtime.run_plan(
            layer.experts, buffers.normed.data_ptr(), tokens, top_k, plan.pairs.ctypes.data, plan.pairs.size,
            plan.chunks.ctypes.data, len(plan.chunks), True, wide, buffers.pair_out.data_ptr(), buffers.shared_out.data_ptr(),
        )  # fmt: skip
        self.runtime.combine(
            x, buffers.pair_out.data_ptr(), buffers.weights.data_ptr(), buffers.shared_out.data_ptr(),
            buffers.gate.data_ptr(), tokens, top_k, self.config.hidden_size,
        )  # fmt: skip

    def plan(self, ids: np.ndarray[tuple[int, int], np.dtype[np.int32]]) -> Plan:
        """The plan for the experts ids int32 [T, K] of one layer call."""
        return Plan.of(ids, columns("cpu", self.runtime.isa, "expert"))

    def _logits(self, sequences: Sequences, buffers: Buffers, all_logits: bool, wide: int) -> list[Tensor]:
        """f32 [1 or t, V] for each sequence."""
        lengths, tokens = sequences.lengths, sum(sequences.lengths)
        x, rows = buffers.x[:tokens], lengths
        if not all_logits and len(lengths) < tokens:
            x, rows = x[torch.tensor(lengths).cumsum(0) - 1], [1] * len(lengths)
        out = torch.empty(x.shape[0], self.lm_head.data.shape[0])
        self.runtime.linear(
            self.lm_head.matrix(), self.norm_scale.data_ptr(), self.config.rms_norm_eps, x.data_ptr(), x.shape[0],
            min(wide, x.shape[0]), out.data_ptr(),
        )  # fmt: skip
        return list(out.split(rows))

    def _room(self, tokens: int) -> Buffers:
        if self._buffers is None or self._buffers.tokens < tokens:
            self._buffers = Buffers(self.config, tokens)
        return self._buffers
