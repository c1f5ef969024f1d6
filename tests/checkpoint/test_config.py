"""config.json: what is understood, against transformers, and what is refused by name."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig

from huorn.checkpoint.config import ModelConfig, read_config
from huorn.errors import CheckpointError

from .folders import FP8_SCHEME

# text_config of the 35B release as checkpoint.md gives it
RELEASE: dict[str, Any] = {
    "model_type": "qwen3_5_moe_text", "hidden_size": 2048, "num_hidden_layers": 40, "num_attention_heads": 16,
    "num_key_value_heads": 2, "head_dim": 256, "attn_output_gate": True, "rms_norm_eps": 1e-6,
    "vocab_size": 248320, "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512, "full_attention_interval": 4, "hidden_act": "silu",
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "max_position_embeddings": 262144,
    "tie_word_embeddings": False, "eos_token_id": 248044, "attention_bias": False,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25,
        "mrope_interleaved": True, "mrope_section": [11, 11, 10],
    },
}  # fmt: skip


def write(directory: Path, text: dict[str, Any], nested: bool = True, **top: Any) -> Path:
    config = {"model_type": "qwen3_5_moe", "text_config": text, **top} if nested else text | top
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize("nested", [True, False])
def test_the_release_is_read_as_transformers_reads_it(tmp_path: Path, nested: bool) -> None:
    config = read_config(write(tmp_path, RELEASE, nested))
    theirs = AutoConfig.from_pretrained(tmp_path)
    theirs = theirs.text_config if nested else theirs
    for name in ModelConfig.model_fields:
        if hasattr(theirs, name) and name != "layer_types":
            assert getattr(config, name) == getattr(theirs, name), name
    assert list(config.layer_types) == theirs.layer_types
    assert config.rope_theta == theirs.rope_parameters["rope_theta"]
    assert config.partial_rotary_factor == theirs.rope_parameters["partial_rotary_factor"]


def test_derived_sizes_of_the_release(tmp_path: Path) -> None:
    config = read_config(write(tmp_path, RELEASE, quantization_config=FP8_SCHEME))
    assert (config.num_linear_layers, config.num_full_layers) == (30, 10)
    assert config.layer_types[3] == "full_attention"
    assert (config.key_dim, config.value_dim, config.conv_dim, config.rotary_dim) == (2048, 4096, 8192, 64)
    assert config.fp8
    assert not config.synthetic
    assert config.eos_token_ids == (248044,)


def test_eos_tokens_come_from_generation_config_first(tmp_path: Path) -> None:
    write(tmp_path, RELEASE)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [248046, 248044]}')
    assert read_config(tmp_path).eos_token_ids == (248046, 248044)


def test_a_config_without_eos_has_none(tmp_path: Path) -> None:
    assert read_config(write(tmp_path, RELEASE | {"eos_token_id": None})).eos_token_ids == ()


def test_rope_may_be_spelled_the_old_way(tmp_path: Path) -> None:
    old = {name: value for name, value in RELEASE.items() if name != "rope_parameters"}
    config = read_config(write(tmp_path, old | {"rope_theta": 5000.0, "partial_rotary_factor": 0.5}))
    assert (config.rope_theta, config.rotary_dim) == (5000.0, 128)


@pytest.mark.parametrize("tied", [True, False])
def test_of_two_words_on_tying_the_outer_one_counts(tmp_path: Path, tied: bool) -> None:
    # as in transformers, where the outer model owns lm_head
    write(tmp_path, RELEASE | {"tie_word_embeddings": not tied}, tie_word_embeddings=tied)
    assert read_config(tmp_path).tie_word_embeddings == tied


def test_the_synthetic_label_is_read(tmp_path: Path) -> None:
    assert read_config(write(tmp_path, RELEASE, synthetic=True)).synthetic


def test_two_words_on_rope_and_scheme_may_agree(tmp_path: Path) -> None:
    text = RELEASE | {"rope_scaling": {"type": "mrope"}, "quantization_config": FP8_SCHEME}
    config = read_config(write(tmp_path, text, quantization_config=FP8_SCHEME))
    assert (config.fp8, config.rope_theta) == (True, 1e7)


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"model_type": "qwen3_moe"}, r"model_type is 'qwen3_moe'"),
    ({}, {"model_type": None}, r"model_type is None"),
    ({"model_type": "qwen3_5_text"}, {}, r"text_config\.model_type is 'qwen3_5_text'"),
    ({"hidden_act": "gelu"}, {}, r"hidden_act is 'gelu'"),
    ({"attention_bias": True}, {}, r"attention_bias is True"),
    ({"attn_output_gate": False}, {}, r"attn_output_gate is False"),
    ({"output_gate_type": "sigmoid"}, {}, r"output_gate_type is 'sigmoid'"),
    ({"mlp_only_layers": [0]}, {}, r"mlp_only_layers is \[0\]"),
    ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e7, "factor": 4.0}}, {}, r"rope type 'yarn'"),
    ({"rope_parameters": None, "rope_scaling": {"type": "linear"}}, {}, r"rope type 'linear'"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, {}, r"rope type 'yarn' in rope_scaling"),
    ({"rope_scaling": {"rope_type": "default", "type": "linear"}}, {}, r"rope type 'linear' in rope_scaling"),
    ({"rope_scaling": []}, {}, r"rope_scaling must be an object"),
    ({"rope_parameters": {}}, {}, r"rope_theta"),
    ({"hidden_size": None}, {}, r"hidden_size: Field required"),
    ({"hidden_size": "2048"}, {}, r"hidden_size: Input should be a valid integer"),
    ({"hidden_size": True}, {}, r"hidden_size: Input should be a valid integer"),
    ({"hidden_size": 0}, {}, r"hidden_size: Input should be greater than"),
    ({"rms_norm_eps": float("nan")}, {}, r"rms_norm_eps"),
    ({"num_hidden_layers": 10**12}, {}, r"num_hidden_layers"),
    ({"num_key_value_heads": 3}, {}, r"num_attention_heads must be a multiple"),
    ({"linear_num_key_heads": 5}, {}, r"linear_num_value_heads must be a multiple"),
    ({"num_experts_per_tok": 257}, {}, r"num_experts_per_tok must not exceed"),
    ({"head_dim": 6}, {}, r"even number"),
    ({"layer_types": ["linear_attention"]}, {}, r"layer_types names 1 layers, num_hidden_layers is 40"),
    ({"layer_types": ["sliding_attention"] * 40}, {}, r"layer_types\.0"),
    ({}, {"text_config": 7}, r"text_config must be an object"),
    ({}, {"quantization_config": {"quant_method": "compressed-tensors", "format": "float-quantized"}},
     r"scheme 'compressed-tensors' \(float-quantized\) is not supported; huorn opens .*FP8 E4M3"),
    ({}, {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}, r"'modelopt' \(NVFP4\)"),
    ({}, {"quantization_config": {"quant_method": "gptq", "bits": 4}}, r"scheme 'gptq'"),
    ({}, {"quantization_config": {"quant_method": "awq"}}, r"scheme 'awq'"),
    ({}, {"quantization_config": {}}, r"scheme None"),
    ({}, {"quantization_config": FP8_SCHEME | {"fmt": "e5m2"}}, r"fmt 'e5m2'"),
    ({}, {"quantization_config": FP8_SCHEME | {"weight_block_size": [64, 64]}}, r"weight_block_size \[64, 64\]"),
    ({}, {"quantization_config": {"quant_method": "fp8"}}, r"weight_block_size None"),
    ({}, {"quantization_config": FP8_SCHEME | {"activation_scheme": "static"}}, r"activation_scheme 'static'"),
    (
        {"quantization_config": {"quant_method": "gptq"}},
        {"quantization_config": FP8_SCHEME},
        r"text_config\.quantization_config: quantisation scheme 'gptq'",
    ),
    (
        {},
        {"quantization_config": FP8_SCHEME, "compression_config": {"format": "pack-quantized"}},
        r"compression_config: quantisation scheme None \(pack-quantized\)",
    ),
    ({"compression_config": FP8_SCHEME}, {}, r"text_config\.compression_config: quantisation scheme 'fp8'"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "top", "message"), REFUSED, ids=[message for _, _, message in REFUSED])
def test_what_huorn_does_not_run_is_refused_by_name(
    tmp_path: Path, text: dict[str, Any], top: dict[str, Any], message: str
) -> None:
    write(tmp_path, RELEASE | text, **top)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_config(tmp_path)
    assert "config.json" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"\xff\xfe{}", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not valid JSON"),
        (b"[]", "not an object"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n", "Git LFS pointer"),
    ],
)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_damaged_file_is_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    write(tmp_path, RELEASE)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_config(tmp_path)
    assert name in str(caught.value)


def test_a_missing_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        read_config(tmp_path)


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(data=st.data(), value=anything)
def test_any_value_in_any_field_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, value: object
) -> None:
    config: dict[str, Any] = {
        "text_config": RELEASE,
        "model_type": "qwen3_5_moe",
        "quantization_config": FP8_SCHEME,
    }
    config = json.loads(json.dumps(config))
    known = [*RELEASE, "layer_types", "rope_scaling", "output_gate_type"]
    places: list[tuple[dict[str, Any], str]] = [
        (config, data.draw(st.sampled_from([*config, "tie_word_embeddings", "eos_token_id", "synthetic"]))),
        (config["text_config"], data.draw(st.sampled_from(known))),
        (config["text_config"]["rope_parameters"], data.draw(st.sampled_from([*RELEASE["rope_parameters"]]))),
        (config["quantization_config"], data.draw(st.sampled_from([*FP8_SCHEME]))),
    ]
    holder, name = data.draw(st.sampled_from(places))
    holder[name] = value
    directory = tmp_path_factory.getbasetemp()
    (directory / "config.json").write_text(json.dumps(config))
    with suppress(CheckpointError):
        assert isinstance(read_config(directory), ModelConfig)
