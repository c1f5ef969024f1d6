"""Gated full attention: grouped queries over a KV cache, output gated per head before the last projection."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from huorn.checkpoint.config import ModelConfig
from huorn.model.linear import Linear
from huorn.model.norm import RMSNorm
from huorn.model.precision import Precision
from huorn.model.rotary import Rotation
from huorn.model.state import KeyValues

# Scores of one block of queries. All 512 of a prefill chunk at position 262,144 of the 35B shape would take 8 GiB.
SCORE_BYTES = 64 << 20


@dataclass(frozen=True, eq=False)
class GatedAttention:
    """One full attention layer. qkv stacks q_proj (per head: head_dim rows of query, then head_dim of gate),
    k_proj and v_proj."""

    config: ModelConfig
    precision: Precision
    qkv: Linear
    q_norm: RMSNorm
    k_norm: RMSNorm
    o: Linear

    def __call__(self, x: Tensor, rotation: Rotation, kv: KeyValues, position: int) -> Tensor:
        """x f32 [T, D], the operand -> f32 [T, D]. Writes rows position .. position + T - 1 of kv."""
        tokens, dim = x.shape[0], self.config.head_dim
        heads, kv_heads = self.config.num_attention_heads, self.config.num_key_value_heads
        sizes = [2 * heads * dim, kv_heads * dim, kv_heads * dim]
        queries, keys, values = self.qkv(x).split_with_sizes(sizes, dim=-1)
        query, gate = queries.view(tokens, heads, 2, dim).unbind(2)
        query = self.precision.operand(rotation(self.q_norm(query)))

        end = position + tokens
        kv.keys[position:end] = rotation(self.k_norm(keys.view(tokens, kv_heads, dim)))
        kv.values[position:end] = values.view(tokens, kv_heads, dim)
        mixed = causal_attention(query, kv.keys[:end].float(), kv.values[:end].float(), self.precision)
        return self.o(self.precision.operand((mixed * gate.sigmoid()).reshape(tokens, heads * dim)))


def causal_attention(query: Tensor, keys: Tensor, values: Tensor, precision: Precision) -> Tensor:
    """softmax(q k^T / sqrt(head_dim)) v for the last T of N positions; each query sees keys up to its own.

    query f32 [T, H, head_dim], keys and values f32 [N, Hkv, head_dim], N >= T -> f32 [T, H, head_dim]. Query
    head h reads KV head h // (H / Hkv). Queries go in blocks so that the scores of one stay within SCORE_BYTES.
    """
    tokens, heads, dim = query.shape
    total, kv_heads, _ = keys.shape
    keys, values = keys.permute(1, 2, 0), values.permute(1, 0, 2)  # [Hkv, head_dim, N], [Hkv, N, head_dim]
    block = max(1, SCORE_BYTES // (4 * heads * total))
    mixed = []
    for start in range(0, tokens, block):
        part = query[start : start + block]
        count = part.shape[0]
        seen = total - tokens + start + count  # keys that the last query of the block sees
        # [Hkv, T * group, head_dim]: the queries of one group share keys, so they are rows of one matmul.
        rows = part.view(count, kv_heads, -1, dim).transpose(0, 1).reshape(kv_heads, -1, dim)
        scores = torch.bmm(rows, keys[:, :, :seen]).mul_(dim**-0.5)
        if count > 1:
            future = torch.ones(count, seen, dtype=torch.bool).triu(seen - count + 1)
            scores.view(kv_heads, count, -1, seen).masked_fill_(future[:, None, :], float("-inf"))
        out = torch.bmm(precision.operand(scores.softmax(-1)), values[:, :seen])
        mixed.append(out.view(kv_heads, count, -1, dim).transpose(0, 1).reshape(count, heads, dim))
    return mixed[0] if len(mixed) == 1 else torch.cat(mixed)
