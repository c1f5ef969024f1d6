"""The oracle: small random models of transformers, saved to disk, and the one number that compares logits."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig

from huorn.model.decoder import Decoder
from huorn.model.state import DecodeState

GAIN = 0.8  # of every matrix but the router
LINEAR, FULL = "linear_attention", "full_attention"


@dataclass(frozen=True)
class Case:
    """One random model: where it differs from the base shape, and a seed."""

    name: str
    seed: int
    shape: dict[str, Any] = field(default_factory=dict)

    def config(self) -> Qwen3_5MoeTextConfig:
        base: dict[str, Any] = {
            "vocab_size": 211,
            "hidden_size": 96,
            "layer_types": [LINEAR, LINEAR, LINEAR, FULL],
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "linear_conv_kernel_dim": 4,
            "num_experts": 16,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 24,
            "max_position_embeddings": 1024,
            "eos_token_id": None,
        }
        shape = base | self.shape
        return Qwen3_5MoeTextConfig(num_hidden_layers=len(shape["layer_types"]), **shape)


def rope(theta: float, factor: float) -> dict[str, Any]:
    return {
        "rope_type": "default",
        "rope_theta": theta,
        "partial_rotary_factor": factor,
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
    }


CASES = [
    Case("three-linear-one-full-gqa4-top8", 1, {"num_key_value_heads": 1, "num_experts_per_tok": 8}),
    Case(
        "odd-widths-gqa1-top1-tied-conv3",
        2,
        {
            "hidden_size": 73,
            "layer_types": [FULL, LINEAR, FULL, LINEAR],
            "num_key_value_heads": 4,
            "head_dim": 20,
            "rope_parameters": rope(10_000.0, 0.5),
            "linear_num_key_heads": 3,
            "linear_num_value_heads": 3,
            "linear_key_head_dim": 12,
            "linear_value_head_dim": 20,
            "linear_conv_kernel_dim": 3,
            "num_experts": 5,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 13,
            "shared_expert_intermediate_size": 29,
            "tie_word_embeddings": True,
        },
    ),
    Case(
        "only-linear-values4-conv2-tied",
        3,
        {
            "hidden_size": 130,
            "layer_types": [LINEAR] * 3,
            "linear_num_value_heads": 8,
            "linear_key_head_dim": 28,
            "linear_value_head_dim": 10,
            "linear_conv_kernel_dim": 2,
            "tie_word_embeddings": True,
        },
    ),
    Case(
        "only-full-gqa2",
        4,
        {
            "hidden_size": 100,
            "layer_types": [FULL] * 3,
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "rope_parameters": rope(1e7, 0.25),
        },
    ),
    Case(
        "every-expert-conv5-rotary-whole-head",
        5,
        {
            "hidden_size": 33,
            "layer_types": [LINEAR, FULL, LINEAR],
            "head_dim": 14,
            "rope_parameters": rope(500.0, 1.0),
            "linear_conv_kernel_dim": 5,
            "num_experts": 4,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 7,
        },
    ),
    Case(
        "seedling-like",
        6,
        {
            "vocab_size": 512,
            "hidden_size": 256,
            "layer_types": [LINEAR, LINEAR, LINEAR, FULL] * 2,
            "head_dim": 64,
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 8,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 32,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 64,
            "tie_word_embeddings": True,
        },
    ),
]


def random_model(case: Case) -> Qwen3_5MoeForCausalLM:
    """A float32 transformers model whose every part matters.

    transformers' own initialisation (std 0.02, norms at the identity) leaves attention and routing almost uniform, so
    that a wrong mask or a wrong expert would hardly show. Here matrices keep the size of their input, router logits
    spread by 2, decays range from almost none to almost all of the state, and norm weights are random.
    """
    config = case.config()
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    model = Qwen3_5MoeForCausalLM(config).float().eval()
    generator = torch.Generator().manual_seed(case.seed)
    last = f"model.layers.{config.num_hidden_layers - 1}."

    def normal(tensor: Tensor, std: float, mean: float = 0.0) -> None:
        tensor.copy_(torch.randn(tensor.shape, generator=generator) * std + mean)

    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if name.endswith("A_log"):
                tensor.copy_(torch.rand(tensor.shape, generator=generator).mul_(15.9).add_(0.1).log_())
            elif name.endswith("dt_bias"):
                tensor.copy_(torch.rand(tensor.shape, generator=generator) * 6 - 5)
            elif name.endswith("linear_attn.norm.weight"):
                normal(tensor, 0.3, mean=1.0)
            elif name.endswith("norm.weight"):
                normal(tensor, 0.3)
            elif name.endswith("conv1d.weight"):
                normal(tensor, tensor.shape[-1] ** -0.5)
            elif name.endswith("embed_tokens.weight"):
                normal(tensor, 1.0)
            else:
                gain = 2.0 if name.endswith("mlp.gate.weight") else GAIN
                if config.tie_word_embeddings and name.startswith(last) and "down_proj" in name:
                    gain = 40.0  # or every token would predict itself, being so near its own embedding
                normal(tensor, gain * tensor.shape[-1] ** -0.5)
    return model


def random_tokens(case: Case, count: int) -> Tensor:
    """int64 [count] token ids of the case's vocabulary."""
    generator = torch.Generator().manual_seed(case.seed + 1000)
    return torch.randint(case.config().vocab_size, (count,), generator=generator)


@torch.no_grad()
def oracle_logits(model: Qwen3_5MoeForCausalLM, tokens: Tensor) -> Tensor:
    """f32 [T, V] of one shot through transformers, no cache."""
    return model(tokens[None], use_cache=False).logits[0].float()


def save(model: Qwen3_5MoeForCausalLM, directory: Path) -> Path:
    """The model as transformers writes it: experts one by one, a flat text config, no tied lm_head."""
    model.save_pretrained(directory)
    return directory


def run_pieces(decoder: Decoder, tokens: Tensor, lengths: Sequence[int]) -> Tensor:
    """Logits f32 [T, V] of a fresh sequence fed in pieces of these lengths, which add up to T."""
    state = DecodeState.new(decoder.config, len(tokens), decoder.precision)
    pieces = tokens.split(list(lengths))
    return torch.cat([decoder.forward(piece, state, all_logits=True) for piece in pieces])


def random_cuts(total: int, seed: int) -> list[int]:
    """Lengths that add up to total: 1, 2 and 3 (fewer than most convolution widths) more often than long ones."""
    generator = random.Random(seed)
    lengths: list[int] = []
    while (left := total - sum(lengths)) > 0:
        lengths.append(min(left, generator.choice([1, 2, 3, generator.randint(1, 90)])))
    return lengths


def difference(ours: Tensor, theirs: Tensor) -> float:
    """max |ours - theirs| / max |theirs| over all logits of all positions."""
    return float((ours.double() - theirs.double()).abs().max() / theirs.double().abs().max())


def token_errors(logits: Tensor, reference: Tensor) -> Tensor:
    """Root mean square error of each token's logits [T], relative to the root mean square of all reference logits."""
    return (logits - reference).square().mean(-1).sqrt() / reference.square().mean().sqrt()
