"""A small ModelConfig and a random Decoder, made without a checkpoint."""

from __future__ import annotations

from typing import Any

from huorn.checkpoint.config import ModelConfig


def small_config(**changes: Any) -> ModelConfig:
    """Two linear layers and a full one; `changes` are fields of ModelConfig."""
    fields: dict[str, Any] = {
        "hidden_size": 24,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-6,
        "vocab_size": 50,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 8,
        "shared_expert_intermediate_size": 8,
        "layer_types": ("linear_attention", "full_attention", "linear_attention"),
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 6,
        "linear_value_head_dim": 5,
        "linear_conv_kernel_dim": 4,
        "max_position_embeddings": 64,
        "rope_theta": 10_000.0,
        "partial_rotary_factor": 0.5,
    }
    return ModelConfig(**(fields | changes))
