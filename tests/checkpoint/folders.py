"""Tiny checkpoints in every layout of the wild, made from the state of a transformers model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig

from huorn.checkpoint.fp8 import quantize_fp8

LAYERS, EXPERTS, INTERMEDIATE = 4, 3, 20
INDEX = "model.safetensors.index.json"
Tensors = dict[str, Tensor]

# hidden_size 144: two blocks of 128, the second one ragged
SHAPE: dict[str, Any] = {
    "vocab_size": 40, "hidden_size": 144, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "num_experts": EXPERTS, "num_experts_per_tok": 2,
    "moe_intermediate_size": INTERMEDIATE, "shared_expert_intermediate_size": 12, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 6, "linear_value_head_dim": 10,
}  # fmt: skip
FP8_SCHEME = {
    "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
}  # fmt: skip

# Which matrices the FP8 release stores as codes (checkpoint.md's table)
FP8_MATRICES = (
    "_proj.weight", "in_proj_qkv.weight", "in_proj_z.weight",
)  # fmt: skip
NEVER_FP8 = ("in_proj_a.weight", "in_proj_b.weight")


def text_config(**changes: Any) -> Qwen3_5MoeTextConfig:
    return Qwen3_5MoeTextConfig(**(SHAPE | changes))


def model_of(config: Qwen3_5MoeTextConfig, dtype: torch.dtype = torch.float32) -> Qwen3_5MoeForCausalLM:
    """A transformers model with random weights everywhere, norms and biases included."""
    torch.manual_seed(1)
    model = Qwen3_5MoeForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    return model.to(dtype)


def fused_state(model: Qwen3_5MoeForCausalLM) -> Tensors:
    """Canonical name -> tensor, experts fused as transformers holds them; lm_head missing when tied."""
    state = {name.removeprefix("model."): tensor.detach() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    return state


def split_experts(state: Tensors) -> Tensors:
    """Fused experts as one tensor per projection and expert."""
    split: Tensors = {}
    for name, tensor in state.items():
        stem, _, last = name.rpartition(".")
        if last == "gate_up_proj":
            for e in range(EXPERTS):
                split[f"{stem}.{e}.gate_proj.weight"] = tensor[e, :INTERMEDIATE]
                split[f"{stem}.{e}.up_proj.weight"] = tensor[e, INTERMEDIATE:]
        elif last == "down_proj":
            for e in range(EXPERTS):
                split[f"{stem}.{e}.down_proj.weight"] = tensor[e]
        else:
            split[name] = tensor
    return split


def quantized(state: Tensors, scale_dtype: torch.dtype) -> Tensors:
    """Split state as in the FP8 release: codes and scales for the large matrices."""
    result: Tensors = {}
    for name, tensor in state.items():
        if name.endswith(FP8_MATRICES) and not name.endswith(NEVER_FP8):
            codes, scale = quantize_fp8(tensor.float(), scale_dtype)
            result[name], result[name + "_scale_inv"] = codes, scale
        else:
            result[name] = tensor
    return result


def prefixed(state: Tensors, prefix: str) -> Tensors:
    """On-disk names."""
    return {n if n.startswith("lm_head.") else prefix + n: t for n, t in state.items()}


def flat_config(config: Qwen3_5MoeTextConfig, **changes: Any) -> dict[str, Any]:
    return config.to_dict() | changes


def nested_config(config: Qwen3_5MoeTextConfig, **changes: Any) -> dict[str, Any]:
    return {"model_type": "qwen3_5_moe", "text_config": config.to_dict()} | changes


def write_folder(directory: Path, config: dict[str, Any], tensors: Tensors, shards: int = 1) -> Path:
    """A checkpoint folder: config.json and model.safetensors, or `shards` files with an index."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    stored = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    if shards == 1:
        save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})
        return directory
    homes: dict[str, str] = {}
    names = sorted(stored)
    for number in range(shards):
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        part = names[number::shards]
        save_file({name: stored[name] for name in part}, directory / file)
        homes |= dict.fromkeys(part, file)
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": homes}))
    return directory


def dequantized(codes: Tensor, scale_inv: Tensor) -> Tensor:
    """The oracle: every weight times the scale of its block, element by element in F32."""
    rows, columns = codes.shape
    row_block, column_block = torch.arange(rows) // 128, torch.arange(columns) // 128
    return codes.float() * scale_inv.float()[row_block][:, column_block]
