"""Writes a transformers model as an FP8 checkpoint in the layout of the official release."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import Qwen3_5MoeForCausalLM

from huorn.checkpoint.fp8 import quantize_fp8

# The matrices that the release stores as FP8 codes; everything else is BF16.
FP8_MATRIX = re.compile(
    r"(in_proj_qkv|in_proj_z|out_proj|q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)\.weight$"
)


def write_fp8_checkpoint(model: Qwen3_5MoeForCausalLM, directory: Path) -> None:
    """Two shards, an index and a nested config. Changes `model` to the F32 expansion of what was written, so that it
    is the oracle of the checkpoint."""
    tensors: dict[str, Tensor] = {}
    for name, matrix in _matrices(model):
        if FP8_MATRIX.search(name):
            codes, scale = quantize_fp8(matrix, torch.bfloat16)
            rows = scale.float().repeat_interleave(128, 0)[: matrix.shape[0]]
            matrix.copy_(codes.float() * rows.repeat_interleave(128, 1)[:, : matrix.shape[1]])
            tensors[name], tensors[name + "_scale_inv"] = codes, scale
        else:
            matrix.copy_(matrix.bfloat16())
            tensors[name] = matrix.bfloat16().contiguous()
    _write_shards(tensors, directory)
    config = {
        "model_type": "qwen3_5_moe",
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "tie_word_embeddings": model.config.tie_word_embeddings,
        "text_config": model.config.to_dict(),
        "quantization_config": {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
        },
    }
    (directory / "config.json").write_text(json.dumps(config))


def _matrices(model: Qwen3_5MoeForCausalLM) -> Iterator[tuple[str, Tensor]]:
    """Name in the release, and a view of the parameter: fused experts one by one, text under its prefix."""
    for name, parameter in model.named_parameters():
        tensor = parameter.detach()
        released = name.replace("model.", "model.language_model.", 1)
        if name.endswith("experts.gate_up_proj"):
            stem, width = released.removesuffix("gate_up_proj"), tensor.shape[1] // 2
            for expert, both in enumerate(tensor):
                yield f"{stem}{expert}.gate_proj.weight", both[:width]
                yield f"{stem}{expert}.up_proj.weight", both[width:]
        elif name.endswith("experts.down_proj"):
            stem = released.removesuffix("down_proj")
            for expert, down in enumerate(tensor):
                yield f"{stem}{expert}.down_proj.weight", down
        else:
            yield released, tensor


def _write_shards(tensors: dict[str, Tensor], directory: Path) -> None:
    names = list(tensors)
    shards = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for shard, held in shards.items():
        save_file({name: tensors[name] for name in held}, directory / shard)
    weight_map = {name: shard for shard, held in shards.items() for name in held}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
