"""The shapes that can be synthesised, as typed configs and as the config.json each release has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from huorn import __version__
from huorn.checkpoint.config import LayerType, ModelConfig
from huorn.errors import UsageError
from huorn.synth.tokenizer import special_token_id

FULL_ATTENTION_INTERVAL = 4
# Counts of rotary frequencies for time, height and width in the release; for text all three positions are equal.
MROPE_SECTION = (11, 11, 10)


@dataclass(frozen=True)
class Preset:
    """A checkpoint kind: the shape of its model (FP8 or BF16 in `config.fp8`) and the name it goes by."""

    name: str
    config: ModelConfig

    def with_layers(self, layers: int | None) -> ModelConfig:
        """The config with `layers` layers (None: as in the release). Raises UsageError outside 1 to 4096."""
        if layers is None:
            return self.config
        if not 1 <= layers <= 4096:
            release = self.config.num_hidden_layers
            raise UsageError(f"--layers {layers} is out of range; give 1 to 4096 (the release has {release})")
        return self.config.model_copy(
            update={"num_hidden_layers": layers, "layer_types": layer_types(layers)}
        )


def layer_types(layers: int) -> tuple[LayerType, ...]:
    """Three linear layers, then one full layer, and so on."""
    return tuple(
        "full_attention" if n % FULL_ATTENTION_INTERVAL == FULL_ATTENTION_INTERVAL - 1 else "linear_attention"
        for n in range(layers)
    )


def find_preset(name: str) -> Preset:
    """The preset called `name`. Raises UsageError listing the names there are."""
    if name not in PRESETS:
        raise UsageError(f"--preset {name} is unknown; presets are {', '.join(PRESETS)}")
    return PRESETS[name]


def config_json(
    preset: Preset, config: ModelConfig, seed: int, overlap: float | None = None
) -> dict[str, Any]:
    """config.json as the release nests it, without vision_config, and labelled as synthetic."""
    text = {
        "model_type": "qwen3_5_moe_text",
        "attention_bias": False,
        "attn_output_gate": True,
        "dtype": "bfloat16",
        "eos_token_id": special_token_id("<|endoftext|>", config.vocab_size),
        "full_attention_interval": FULL_ATTENTION_INTERVAL,
        "hidden_act": "silu",
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        **{name: getattr(config, name) for name in _CONFIG_FIELDS},
        "layer_types": list(config.layer_types),
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": config.rope_theta,
            "partial_rotary_factor": config.partial_rotary_factor,
            "mrope_interleaved": True,
            "mrope_section": list(MROPE_SECTION),
        },
    }
    top: dict[str, Any] = {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "tie_word_embeddings": config.tie_word_embeddings,
        "text_config": text,
        "synthetic": True,
        "huorn_synthetic": {
            "note": "Weights are pseudo-random numbers, not a trained model. The vision tower is left out.",
            "preset": preset.name,
            "seed": seed,
            "version": __version__,
        },
    }
    if overlap is not None:
        top["huorn_synthetic"]["overlap"] = overlap
    if config.fp8:
        top["quantization_config"] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": _unconverted_modules(config),
        }
    return top


def generation_config_json(config: ModelConfig) -> dict[str, Any]:
    """generation_config.json with the release's stop tokens and sampling advice."""
    end, text_end = (special_token_id(token, config.vocab_size) for token in ("<|im_end|>", "<|endoftext|>"))
    return {
        "bos_token_id": text_end,
        "pad_token_id": text_end,
        "eos_token_id": [end, text_end],
        "do_sample": True,
        "temperature": 1.0,
        "top_k": 20,
        "top_p": 0.95,
    }


def _unconverted_modules(config: ModelConfig) -> list[str]:
    """Modules that stay BF16 in an FP8 release."""
    modules = ["lm_head", "model.language_model.embed_tokens", "mtp.fc"]
    for n, kind in enumerate(config.layer_types):
        layer = f"model.language_model.layers.{n}."
        modules += [f"{layer}mlp.gate", f"{layer}mlp.shared_expert_gate"]
        if kind == "linear_attention":
            modules += [f"{layer}linear_attn.{part}" for part in ("conv1d", "in_proj_a", "in_proj_b")]
    return [*modules, "mtp.layers.0.mlp.gate", "mtp.layers.0.mlp.shared_expert_gate"]


_CONFIG_FIELDS = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "vocab_size",
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
    "max_position_embeddings",
    "tie_word_embeddings",
)
_QWEN_35B_FP8 = ModelConfig(
    hidden_size=2048,
    num_hidden_layers=40,
    num_attention_heads=16,
    num_key_value_heads=2,
    head_dim=256,
    rms_norm_eps=1e-6,
    vocab_size=248_320,
    num_experts=256,
    num_experts_per_tok=8,
    moe_intermediate_size=512,
    shared_expert_intermediate_size=512,
    layer_types=layer_types(40),
    linear_num_key_heads=16,
    linear_num_value_heads=32,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
    linear_conv_kernel_dim=4,
    max_position_embeddings=262_144,
    rope_theta=1e7,
    partial_rotary_factor=0.25,
    fp8=True,
)
# No width is a multiple of 128, so every matrix has ragged blocks on both sides; about 4 MB.
_TINY_FP8 = ModelConfig(
    hidden_size=136,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=40,
    rms_norm_eps=1e-6,
    vocab_size=520,
    num_experts=16,
    num_experts_per_tok=4,
    moe_intermediate_size=72,
    shared_expert_intermediate_size=88,
    layer_types=layer_types(4),
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=24,
    linear_value_head_dim=36,
    linear_conv_kernel_dim=4,
    max_position_embeddings=4096,
    rope_theta=1e7,
    partial_rotary_factor=0.25,
    fp8=True,
)
PRESETS = {
    preset.name: preset
    for preset in (
        Preset("qwen3.5-35b-a3b-fp8", _QWEN_35B_FP8),
        Preset("qwen3.5-35b-a3b-bf16", _QWEN_35B_FP8.model_copy(update={"fp8": False})),
        Preset("tiny-fp8", _TINY_FP8),
    )
}
