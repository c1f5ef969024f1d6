"""What a sequence leaves behind for its next token: the KV cache of full layers, two states per linear layer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from huorn.checkpoint.config import ModelConfig
from huorn.errors import UsageError
from huorn.model.precision import Precision


@dataclass(frozen=True, eq=False)
class KeyValues:
    """One full layer: keys and values [context, Hkv, head_dim] in the KV dtype. Rows from `position` on are free."""

    keys: Tensor
    values: Tensor


class DecodeState:
    """State of one sequence of at most `context` tokens, of which `position` have been read.

    conv holds, per linear layer, the last kernel - 1 inputs of its convolution, f32 [kernel - 1, conv_dim], oldest
    first; recurrent its delta-rule memory, f32 [Hv, dk, dv] (in BF16, text collapses after a few tokens).

    A forward writes free rows of `kv` and replaces conv and recurrent by new tensors in `commit`. So one that fails
    on the way (a damaged expert, Ctrl-C) leaves the sequence as it was, at the price of holding both for a moment.
    """

    def __init__(
        self, context: int, kv: Sequence[KeyValues], conv: Sequence[Tensor], recurrent: Sequence[Tensor]
    ) -> None:
        self.context = context
        self.position = 0
        self.kv = tuple(kv)
        self.conv = tuple(conv)
        self.recurrent = tuple(recurrent)
        self._spare: tuple[tuple[Tensor, ...], tuple[Tensor, ...]] | None = None

    @classmethod
    def new(cls, config: ModelConfig, context: int, precision: Precision) -> DecodeState:
        """An empty sequence. UsageError when the model can not have such a context.

        The KV cache takes address space at once but memory only as its rows are written."""
        longest = config.max_position_embeddings
        if not 1 <= context <= longest:
            raise UsageError(
                f"a context of {context} tokens is not possible: this model takes 1 to {longest}"
            )
        rows = (context, config.num_key_value_heads, config.head_dim)
        memory = (config.linear_num_value_heads, config.linear_key_head_dim, config.linear_value_head_dim)
        inputs = (config.linear_conv_kernel_dim - 1, config.conv_dim)
        dtype = precision.kv_dtype
        return cls(
            context,
            kv=[
                KeyValues(torch.zeros(rows, dtype=dtype), torch.zeros(rows, dtype=dtype))
                for _ in range(config.num_full_layers)
            ],
            conv=[torch.zeros(inputs) for _ in range(config.num_linear_layers)],
            recurrent=[torch.zeros(memory) for _ in range(config.num_linear_layers)],
        )

    def check_room(self, tokens: int) -> None:
        """UsageError when `tokens` more do not fit in the context."""
        if self.position + tokens > self.context:
            raise UsageError(
                f"{self.position + tokens} tokens do not fit in a context of {self.context}: "
                "shorten the prompt or give a larger --context"
            )

    def spare(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Tensors (conv, recurrent) for a forward to write and to commit: what `reuse` gave back, or fresh ones."""
        taken, self._spare = self._spare, None
        if taken is None:
            taken = tuple(map(torch.empty_like, self.conv)), tuple(map(torch.empty_like, self.recurrent))
        return taken

    def reuse(self, conv: tuple[Tensor, ...], recurrent: tuple[Tensor, ...]) -> None:
        """Gives back tensors of an earlier position that nobody will come to again: fresh ones would cost 63 MB of page
        faults per token in the 35B shape."""
        self._spare = conv, recurrent

    def commit(self, tokens: int, linear: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Ends a forward over `tokens` tokens that left these (conv, recurrent) in the linear layers."""
        pairs = list(linear)
        conv, recurrent = tuple(conv for conv, _ in pairs), tuple(recurrent for _, recurrent in pairs)
        self.position, self.conv, self.recurrent = self.position + tokens, conv, recurrent


def state_bytes(config: ModelConfig, context: int, precision: Precision) -> tuple[int, int]:
    """(bytes of KV for `context` tokens, bytes of conv and recurrent) of one sequence.

    35B shape in BF16: 20 KiB of KV per token and 63 MiB."""
    per_token = 2 * config.num_key_value_heads * config.head_dim * precision.kv_dtype.itemsize
    conv = (config.linear_conv_kernel_dim - 1) * config.conv_dim
    recurrent = config.linear_num_value_heads * config.linear_key_head_dim * config.linear_value_head_dim
    return config.num_full_layers * context * per_token, config.num_linear_layers * 4 * (conv + recurrent)
