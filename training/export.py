"""Write the trained weights as checkpoints: `python -m training.export --work DIR --out FOLDER [--format fp8|f32]`.

fp8 is the layout of the official FP8 release (experts one by one, 128 x 128 blocks, BF16 scales, the multimodal text
prefix) and what ships in the package; f32 is a text-only checkpoint that transformers opens as Qwen3_5MoeForCausalLM.
"""

from __future__ import annotations

import json
import shutil
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from safetensors.torch import load_file, save_file
from torch import Tensor

from huorn.checkpoint.fp8 import quantize_fp8
from training.model import Shape, init_weights
from training.optim import Flat

CHAT_TEMPLATE = Path(__file__).parent / "chat_template.jinja"
F8_NAMES = ("q_proj", "k_proj", "v_proj", "o_proj", "in_proj_qkv", "in_proj_z", "out_proj", "gate_proj", "up_proj",
            "down_proj")  # fmt: skip
NOT_CONVERTED = ["lm_head", "model.language_model.embed_tokens"]


class Format(StrEnum):
    """Layout of an exported checkpoint."""

    FP8 = "fp8"
    F32 = "f32"


def trained_weights(work: Path) -> dict[str, Tensor]:
    """The F32 weights of the last saved state, by canonical name, experts stacked."""
    shapes = {name: tensor.shape for name, tensor in init_weights(Shape(), 0).items()}
    return Flat(shapes, load_file(work / "state.safetensors")["weights"]).views


def text_config(shape: Shape, eos: list[int]) -> dict[str, Any]:
    """The text model's part of config.json."""
    size = int(shape.head_dim * shape.partial_rotary_factor) // 2
    third = [size - 2 * (size // 3), size // 3, size // 3]
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
             "rms_norm_eps", "num_experts", "num_experts_per_tok", "moe_intermediate_size",
             "shared_expert_intermediate_size", "linear_num_key_heads", "linear_num_value_heads",
             "linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim", "vocab_size",
             "max_position_embeddings", "layer_types")  # fmt: skip
    return {
        "model_type": "qwen3_5_moe_text",
        **{name: getattr(shape, name) for name in names},
        "hidden_act": "silu",
        "attention_bias": False,
        "attn_output_gate": True,
        "full_attention_interval": shape.full_attention_interval,
        "tie_word_embeddings": False,
        "eos_token_id": eos,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": shape.rope_theta,
            "partial_rotary_factor": shape.partial_rotary_factor,
            "mrope_interleaved": True,
            "mrope_section": third,
        },
    }


def f32_tensors(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Text-only names, experts fused as in the BF16 release."""
    return {
        name if name.startswith("lm_head") else "model." + name: tensor for name, tensor in weights.items()
    }


def fp8_tensors(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The official FP8 layout: hidden matrices as E4M3 codes with BF16 block scales, the rest BF16 (A_log F32)."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in split_experts(weights).items():
        full = name if name.startswith("lm_head") else "model.language_model." + name
        if name.rsplit(".", 2)[-2] in F8_NAMES:
            codes, scale = quantize_fp8(tensor, torch.bfloat16)
            tensors[full], tensors[full + "_scale_inv"] = codes, scale
        else:
            keep = torch.float32 if name.endswith(("A_log", "dt_bias")) else torch.bfloat16
            tensors[full] = tensor.to(keep).contiguous()
    return tensors


def split_experts(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Stacked experts as one gate, up and down matrix each; everything else as it is."""
    single: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        if name.endswith("experts.gate_up_proj"):
            prefix = name.removesuffix("gate_up_proj")
            for e, both in enumerate(tensor):
                single[f"{prefix}{e}.gate_proj.weight"], single[f"{prefix}{e}.up_proj.weight"] = both.chunk(2)
        elif name.endswith("experts.down_proj"):
            prefix = name.removesuffix("down_proj")
            single |= {f"{prefix}{e}.down_proj.weight": down for e, down in enumerate(tensor)}
        else:
            single[name] = tensor
    return single


def write_checkpoint(weights: dict[str, Tensor], tokenizer: Path, out: Path, layout: Format) -> None:
    """Write a whole checkpoint folder: weights, configs, tokenizer, chat template."""
    vocabulary = {
        token["content"]: token["id"] for token in json.loads(tokenizer.read_text())["added_tokens"]
    }
    eos = [vocabulary["<|im_end|>"], vocabulary["<|endoftext|>"]]
    text = text_config(Shape(), eos)
    config: dict[str, Any] = {"architectures": ["Qwen3_5MoeForCausalLM"], **text, "dtype": "float32"}
    if layout is Format.FP8:
        config = {
            "architectures": ["Qwen3_5MoeForConditionalGeneration"],
            "model_type": "qwen3_5_moe",
            "text_config": text,
            "tie_word_embeddings": False,
            "quantization_config": {
                "quant_method": "fp8",
                "fmt": "e4m3",
                "activation_scheme": "dynamic",
                "weight_block_size": [128, 128],
                "modules_to_not_convert": NOT_CONVERTED,
            },
        }
    out.mkdir(parents=True, exist_ok=True)
    tensors = fp8_tensors(weights) if layout is Format.FP8 else f32_tensors(weights)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)  # safetensors makes it private to the user
    write_json(out / "config.json", config)
    write_json(out / "generation_config.json", {"eos_token_id": eos})
    write_json(
        out / "tokenizer_config.json",
        {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"},
    )
    shutil.copyfile(CHAT_TEMPLATE, out / "chat_template.jinja")
    shutil.copyfile(tokenizer, out / "tokenizer.json")


def write_json(path: Path, value: object) -> None:
    """Readable JSON with a final newline."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def main(
    work: Annotated[Path, typer.Option(help="folder of a training run")],
    out: Annotated[Path, typer.Option(help="checkpoint folder to write")],
    layout: Annotated[Format, typer.Option("--format")] = Format.FP8,
) -> None:
    """Export the last saved state of a training run."""
    write_checkpoint(trained_weights(work), work / "tokenizer.json", out, layout)
    size = (out / "model.safetensors").stat().st_size
    print(f"{out}: {size / 1e6:.1f} MB of weights")


if __name__ == "__main__":
    typer.run(main)
