"""The one table of tensors a checkpoint must hold: name, shape and the dtypes it may be stored in."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from huorn.checkpoint.config import ModelConfig

F8 = "F8_E4M3"
DENSE = ("BF16", "F32")  # norms, embeddings, router, small projections
MATRIX = ("BF16", "F32", F8)  # what the FP8 release stores as codes, with block scales beside them
SCALE = ("BF16", "F32")
SCALE_SUFFIX = "_scale_inv"


@dataclass(frozen=True)
class Layout:
    """How a checkpoint spells its tensors: prefix of text tensors, experts fused per layer or one by one."""

    prefix: str
    fused_experts: bool

    def on_disk(self, name: str) -> str:
        """The name in the file of a canonical name: the prefix and it, except `lm_head.*`, which has none."""
        return name if name.startswith("lm_head.") else self.prefix + name


class TensorSpec(NamedTuple):
    """One tensor a checkpoint must hold; canonical name, allowed dtypes as safetensors spells them."""

    name: str
    shape: tuple[int, ...]
    dtypes: tuple[str, ...]


def expected_tensors(config: ModelConfig, layout: Layout) -> Iterator[TensorSpec]:
    """Every text tensor of the model except block scales, which exist exactly where a matrix is stored in F8.

    `lm_head.weight` is not listed when embeddings are tied.
    """
    c, matrix = config, MATRIX if config.fp8 else DENSE
    d = c.hidden_size
    yield TensorSpec("embed_tokens.weight", (c.vocab_size, d), DENSE)
    for n, kind in enumerate(c.layer_types):
        layer = f"layers.{n}."
        yield TensorSpec(layer + "input_layernorm.weight", (d,), DENSE)
        yield TensorSpec(layer + "post_attention_layernorm.weight", (d,), DENSE)
        attention = _linear_attention if kind == "linear_attention" else _full_attention
        yield from attention(c, layer, matrix)
        yield from _mlp(c, layer, matrix, layout.fused_experts)
    yield TensorSpec("norm.weight", (d,), DENSE)
    if not c.tie_word_embeddings:
        yield TensorSpec("lm_head.weight", (c.vocab_size, d), matrix)


def _linear_attention(c: ModelConfig, layer: str, matrix: tuple[str, ...]) -> Iterator[TensorSpec]:
    d, heads = c.hidden_size, c.linear_num_value_heads
    p = layer + "linear_attn."
    yield TensorSpec(p + "in_proj_qkv.weight", (c.conv_dim, d), matrix)
    yield TensorSpec(p + "in_proj_z.weight", (c.value_dim, d), matrix)
    yield TensorSpec(p + "in_proj_a.weight", (heads, d), DENSE)
    yield TensorSpec(p + "in_proj_b.weight", (heads, d), DENSE)
    yield TensorSpec(p + "conv1d.weight", (c.conv_dim, 1, c.linear_conv_kernel_dim), DENSE)
    yield TensorSpec(p + "A_log", (heads,), DENSE)
    yield TensorSpec(p + "dt_bias", (heads,), DENSE)
    yield TensorSpec(p + "norm.weight", (c.linear_value_head_dim,), DENSE)
    yield TensorSpec(p + "out_proj.weight", (d, c.value_dim), matrix)


def _full_attention(c: ModelConfig, layer: str, matrix: tuple[str, ...]) -> Iterator[TensorSpec]:
    d, width = c.hidden_size, c.num_attention_heads * c.head_dim
    kv_width = c.num_key_value_heads * c.head_dim
    p = layer + "self_attn."
    yield TensorSpec(p + "q_proj.weight", (2 * width, d), matrix)  # per head: query, then output gate
    yield TensorSpec(p + "k_proj.weight", (kv_width, d), matrix)
    yield TensorSpec(p + "v_proj.weight", (kv_width, d), matrix)
    yield TensorSpec(p + "o_proj.weight", (d, width), matrix)
    yield TensorSpec(p + "q_norm.weight", (c.head_dim,), DENSE)
    yield TensorSpec(p + "k_norm.weight", (c.head_dim,), DENSE)


def _mlp(c: ModelConfig, layer: str, matrix: tuple[str, ...], fused_experts: bool) -> Iterator[TensorSpec]:
    d, i = c.hidden_size, c.moe_intermediate_size
    p = layer + "mlp."
    yield TensorSpec(p + "gate.weight", (c.num_experts, d), DENSE)
    yield TensorSpec(p + "shared_expert_gate.weight", (1, d), DENSE)
    yield from _expert(p + "shared_expert.", d, c.shared_expert_intermediate_size, matrix)
    if fused_experts:
        yield TensorSpec(p + "experts.gate_up_proj", (c.num_experts, 2 * i, d), DENSE)
        yield TensorSpec(p + "experts.down_proj", (c.num_experts, d, i), DENSE)
    else:
        for e in range(c.num_experts):
            yield from _expert(f"{p}experts.{e}.", d, i, matrix)


def _expert(prefix: str, d: int, i: int, matrix: tuple[str, ...]) -> Iterator[TensorSpec]:
    yield TensorSpec(prefix + "gate_proj.weight", (i, d), matrix)
    yield TensorSpec(prefix + "up_proj.weight", (i, d), matrix)
    yield TensorSpec(prefix + "down_proj.weight", (d, i), matrix)
