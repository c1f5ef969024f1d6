"""config.json: the shape of the model, or one sentence why huorn does not run it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from huorn.checkpoint.fp8 import BLOCK
from huorn.errors import CheckpointError, first_problem

LayerType = Literal["linear_attention", "full_attention"]

# Upper bounds only keep a damaged file from asking for 10^18 layers; the 35B shape has 40, and 256 experts.
Width = Annotated[int, Field(ge=1, le=2**31)]
LayerCount = Annotated[int, Field(ge=1, le=4096)]
ExpertCount = Annotated[int, Field(ge=1, le=65536)]

LFS_POINTER = b"version https://git-lfs"
_LARGEST_JSON = 64 * 2**20
_MODEL_TYPES = ("qwen3_5_moe", "qwen3_5_moe_text")
_DEFAULT_ROTARY_FACTOR = 0.25  # of this architecture in transformers when config.json is silent


class ModelConfig(BaseModel):
    """Shape of one model. Names as in config.json's text_config."""

    model_config = ConfigDict(frozen=True, strict=True, allow_inf_nan=False)

    hidden_size: Width
    num_hidden_layers: LayerCount
    num_attention_heads: Width
    num_key_value_heads: Width
    head_dim: Width
    rms_norm_eps: Annotated[float, Field(gt=0)]
    vocab_size: Width
    num_experts: ExpertCount
    num_experts_per_tok: ExpertCount
    moe_intermediate_size: Width
    shared_expert_intermediate_size: Width
    layer_types: tuple[LayerType, ...]
    linear_num_key_heads: Width
    linear_num_value_heads: Width
    linear_key_head_dim: Width
    linear_value_head_dim: Width
    linear_conv_kernel_dim: Annotated[int, Field(ge=2, le=256)]
    max_position_embeddings: Width
    rope_theta: Annotated[float, Field(gt=0)]
    partial_rotary_factor: Annotated[float, Field(gt=0, le=1)] = _DEFAULT_ROTARY_FACTOR
    tie_word_embeddings: bool = False
    eos_token_ids: tuple[Annotated[int, Field(ge=0)], ...] = ()
    fp8: bool = False
    synthetic: bool = False

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(
                f"layer_types names {len(self.layer_types)} layers, "
                f"num_hidden_layers is {self.num_hidden_layers}"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError("num_attention_heads must be a multiple of num_key_value_heads")
        if self.linear_num_value_heads % self.linear_num_key_heads:
            raise ValueError("linear_num_value_heads must be a multiple of linear_num_key_heads")
        if self.num_experts_per_tok > self.num_experts:
            raise ValueError("num_experts_per_tok must not exceed num_experts")
        if self.rotary_dim < 2 or self.rotary_dim % 2:
            raise ValueError("head_dim * partial_rotary_factor must be an even number of at least 2")
        return self

    @property
    def rotary_dim(self) -> int:
        """Leading dims of a head that are rotated (64 of 256 in the 35B shape)."""
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def key_dim(self) -> int:
        """Width of q, and of k, of a linear layer over all its key heads."""
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def value_dim(self) -> int:
        """Width of v, and of z, of a linear layer over all its value heads."""
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def conv_dim(self) -> int:
        """Channels of the causal convolution: q, k and v side by side."""
        return 2 * self.key_dim + self.value_dim

    @property
    def num_linear_layers(self) -> int:
        """Layers with a gated delta net."""
        return self.layer_types.count("linear_attention")

    @property
    def num_full_layers(self) -> int:
        """Layers with full attention, each with a KV cache."""
        return self.layer_types.count("full_attention")


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`. Raises CheckpointError when it is missing, damaged or not an object."""
    try:
        if not path.is_file():
            raise CheckpointError(f"{path} is missing or not a regular file")
        if path.stat().st_size > _LARGEST_JSON:
            raise CheckpointError(
                f"{path} is larger than {_LARGEST_JSON // 2**20} MiB, too large for its kind"
            )
        raw = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} can not be read: {error.strerror}") from error
    if raw.startswith(LFS_POINTER):
        raise CheckpointError(f"{path} is a Git LFS pointer, not the file itself; run `git lfs pull`")
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON ({error}); fetch the file again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a JSON {type(value).__name__}, not an object")
    return value


def read_config(directory: Path) -> ModelConfig:
    """config.json (nested text_config or flat) and generation_config.json of a checkpoint.

    Raises CheckpointError naming what huorn does not run: another model_type, quantisation scheme, rope type,
    attention bias, activation, or attention without output gate.
    """
    path = directory / "config.json"
    top = read_json(path)
    text = _text_config(path, top)
    _refuse_other_variants(path, text)
    rope = _rope(path, text)
    fields: dict[str, Any] = {
        name: text[name] for name in ModelConfig.model_fields if text.get(name) is not None
    }
    fields |= {
        "layer_types": _layer_types(path, text),
        "rope_theta": _first("rope_theta", rope, text),
        "partial_rotary_factor": _first("partial_rotary_factor", rope, text, default=_DEFAULT_ROTARY_FACTOR),
        "tie_word_embeddings": _first("tie_word_embeddings", top, text, default=False),
        "eos_token_ids": _eos_token_ids(directory, top, text),
        "fp8": _is_fp8(path, top, text),
        "synthetic": _first("synthetic", top, text, default=False),
    }
    try:
        return ModelConfig(**fields)
    except ValidationError as error:
        raise CheckpointError(f"{path}: {first_problem(error)}") from error


def _first(name: str, *sources: dict[str, Any], default: Any = None) -> Any:
    """The first value of `name` that is there and not null."""
    return next((source[name] for source in sources if source.get(name) is not None), default)


def _text_config(path: Path, top: dict[str, Any]) -> dict[str, Any]:
    model_type = top.get("model_type")
    if model_type not in _MODEL_TYPES:
        raise CheckpointError(
            f"{path}: model_type is {model_type!r}; huorn runs qwen3_5_moe, the mixture-of-experts models of "
            "Qwen3.5 and Qwen3.6"
        )
    text = top.get("text_config")
    if text is None:
        return top
    if not isinstance(text, dict):
        raise CheckpointError(f"{path}: text_config must be an object")
    if text.get("model_type", "qwen3_5_moe_text") not in _MODEL_TYPES:
        raise CheckpointError(
            f"{path}: text_config.model_type is {text['model_type']!r}; huorn runs qwen3_5_moe_text"
        )
    return text


def _refuse_other_variants(path: Path, text: dict[str, Any]) -> None:
    fixed: dict[str, tuple[Any, ...]] = {
        "hidden_act": ("silu",),
        "attention_bias": (False,),
        "attn_output_gate": (True,),
        "mlp_only_layers": ([],),
        "decoder_sparse_step": (1,),
        "output_gate_type": ("swish", "silu"),  # of the delta net's gated norm; Qwen3.6 names it
    }
    for name, allowed in fixed.items():
        value = text.get(name)
        if value is not None and value not in allowed:
            raise CheckpointError(f"{path}: {name} is {value!r}; huorn runs {name} {allowed[0]!r} only")


def _rope(path: Path, text: dict[str, Any]) -> dict[str, Any]:
    """The rope settings, after both spellings were looked at: transformers obeys either, so neither may be skipped."""
    found: dict[str, Any] = {}
    for key in ("rope_parameters", "rope_scaling"):
        rope = text.get(key)
        if rope is None:
            continue
        if not isinstance(rope, dict):
            raise CheckpointError(f"{path}: {key} must be an object")
        for spelling in ("rope_type", "type"):
            kind = rope.get(spelling, "default")
            if kind not in ("default", "mrope"):
                raise CheckpointError(
                    f"{path}: rope type {kind!r} in {key} is not supported; huorn runs 'default'"
                )
        found = found or rope
    return found


def _layer_types(path: Path, text: dict[str, Any]) -> tuple[Any, ...]:
    layer_types = text.get("layer_types")
    if layer_types is not None:
        if not isinstance(layer_types, list):
            raise CheckpointError(f"{path}: layer_types must be a list")
        return tuple(layer_types)
    layers, interval = text.get("num_hidden_layers"), text.get("full_attention_interval", 4)
    if not (isinstance(layers, int) and isinstance(interval, int) and 0 < layers <= 4096 and interval > 0):
        raise CheckpointError(
            f"{path}: num_hidden_layers and full_attention_interval must be positive numbers"
        )
    return tuple("linear_attention" if (n + 1) % interval else "full_attention" for n in range(layers))


def _eos_token_ids(directory: Path, top: dict[str, Any], text: dict[str, Any]) -> tuple[Any, ...]:
    generation = directory / "generation_config.json"
    own = read_json(generation) if generation.exists() else {}
    value = _first("eos_token_id", own, text, top, default=[])
    return tuple(value) if isinstance(value, list) else (value,)


def _is_fp8(path: Path, top: dict[str, Any], text: dict[str, Any]) -> bool:
    """Whether weights are FP8, after every place that can name a scheme: transformers writes the outer one or the inner."""
    supported = f"huorn opens unquantised BF16 or F32, and FP8 E4M3 with {BLOCK} x {BLOCK} block scales"
    schemes = [("", top)] if text is top else [("", top), ("text_config.", text)]
    fp8 = False
    for prefix, holder in schemes:
        for key in ("quantization_config", "compression_config"):
            scheme = holder.get(key)
            if scheme is not None:
                _refuse_other_schemes(path, prefix + key, scheme, supported)
                fp8 = True
    return fp8


def _refuse_other_schemes(path: Path, where: str, scheme: Any, supported: str) -> None:
    if not isinstance(scheme, dict):
        raise CheckpointError(f"{path}: {where} must be an object")
    method = scheme.get("quant_method")
    if method != "fp8" or where.endswith("compression_config"):  # the latter is compressed-tensors' own key
        kind = scheme.get("format") or scheme.get("quant_algo")
        detail = f" ({kind})" if isinstance(kind, str) else ""
        raise CheckpointError(
            f"{path}: {where}: quantisation scheme {method!r}{detail} is not supported; {supported}"
        )
    expected = {"fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK], "activation_scheme": "dynamic"}
    for name, wanted in expected.items():
        value = scheme.get(name)
        if value != wanted and not (value is None and name != "weight_block_size"):
            raise CheckpointError(f"{path}: {where}: FP8 with {name} {value!r} is not supported; {supported}")
