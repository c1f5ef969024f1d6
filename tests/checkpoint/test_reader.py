"""Every layout of the wild loads, and every tensor is what transformers holds."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import Qwen3_5MoeConfig, Qwen3_5MoeForCausalLM, Qwen3_5MoeForConditionalGeneration

from huorn.checkpoint.names import expected_tensors
from huorn.checkpoint.reader import Checkpoint
from huorn.errors import CheckpointError

from .folders import (
    EXPERTS,
    FP8_SCHEME,
    INTERMEDIATE,
    LAYERS,
    SHAPE,
    Tensors,
    dequantized,
    flat_config,
    fused_state,
    model_of,
    nested_config,
    prefixed,
    quantized,
    split_experts,
    text_config,
    write_folder,
)

OFFICIAL, TEXT_ONLY = "model.language_model.", "model."


def assert_loads(directory: Path, state: Tensors, exact_dtype: bool = True) -> Checkpoint:
    """Opens `directory`, compares every tensor with `state` (canonical, experts fused), then asserts all used."""
    checkpoint = Checkpoint.open(directory)
    with pytest.raises(CheckpointError, match="was never used"):
        checkpoint.assert_text_tensors_used()
    for name, expected in state.items():
        if ".mlp.experts." not in name:
            loaded = checkpoint.tensor(name)
            assert torch.equal(loaded.float(), expected.float()), name
            assert loaded.dtype == expected.dtype or not exact_dtype, name
    for layer in range(LAYERS):
        gate_up = state[f"layers.{layer}.mlp.experts.gate_up_proj"].float()
        down = state[f"layers.{layer}.mlp.experts.down_proj"].float()
        for e in range(EXPERTS):
            expert = checkpoint.expert(layer, e)
            assert torch.equal(expert.gate.expand(), gate_up[e, :INTERMEDIATE])
            assert torch.equal(expert.up.expand(), gate_up[e, INTERMEDIATE:])
            assert torch.equal(expert.down.expand(), down[e])
    checkpoint.assert_text_tensors_used()
    return checkpoint


def expanded(stored: Tensors) -> Tensors:
    """State in fused form that a quantised split state stands for."""
    plain = {
        name: dequantized(tensor, stored[name + "_scale_inv"]) if name + "_scale_inv" in stored else tensor
        for name, tensor in stored.items()
        if not name.endswith("_scale_inv")
    }
    state = {name: tensor for name, tensor in plain.items() if ".mlp.experts." not in name}
    for layer in range(LAYERS):
        p = f"layers.{layer}.mlp.experts."
        gate, up, down = (
            torch.stack([plain[f"{p}{e}.{kind}_proj.weight"] for e in range(EXPERTS)])
            for kind in ("gate", "up", "down")
        )
        state |= {p + "gate_up_proj": torch.cat((gate, up), dim=1), p + "down_proj": down}
    return state


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [False, True])
def test_what_save_pretrained_writes(tmp_path: Path, dtype: torch.dtype, tied: bool) -> None:
    model = model_of(text_config(tie_word_embeddings=tied), dtype)
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert ("lm_head.weight" in stored) == (not tied), "transformers changed what it writes"
    checkpoint = assert_loads(tmp_path, fused_state(model))
    assert checkpoint.config.tie_word_embeddings == tied
    assert torch.equal(checkpoint.weight("lm_head.weight").data, model.lm_head.weight.detach())


def test_what_save_pretrained_writes_in_many_shards(tmp_path: Path) -> None:
    model = model_of(text_config())
    model.save_pretrained(tmp_path, max_shard_size="300KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert_loads(tmp_path, fused_state(model))


def test_a_vision_language_model_loads_its_text_part(tmp_path: Path) -> None:
    vision = {
        "depth": 1, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 144,
        "num_position_embeddings": 16,
    }  # fmt: skip
    model = Qwen3_5MoeForConditionalGeneration(Qwen3_5MoeConfig(text_config=SHAPE, vision_config=vision))
    model.bfloat16().save_pretrained(tmp_path)
    state = {
        name.removeprefix(OFFICIAL): tensor.detach()
        for name, tensor in model.state_dict().items()
        if ".visual." not in name
    }
    checkpoint = assert_loads(tmp_path, state)
    assert checkpoint.layout.prefix == OFFICIAL
    assert checkpoint.ignored() == {"vision": sum(".visual." in name for name in model.state_dict())}


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("prefix", [OFFICIAL, TEXT_ONLY])
def test_fused_bf16_experts(tmp_path: Path, prefix: str, shards: int) -> None:
    state = fused_state(model_of(text_config(), torch.bfloat16))
    config = nested_config(text_config()) if prefix == OFFICIAL else flat_config(text_config())
    checkpoint = assert_loads(write_folder(tmp_path, config, prefixed(state, prefix), shards), state)
    assert checkpoint.layout.fused_experts
    assert checkpoint.layout.prefix == prefix


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("prefix", [OFFICIAL, TEXT_ONLY])
@pytest.mark.parametrize("tied", [False, True])
def test_official_fp8(tmp_path: Path, prefix: str, scale_dtype: torch.dtype, tied: bool) -> None:
    config = text_config(tie_word_embeddings=tied)
    stored = quantized(split_experts(fused_state(model_of(config, torch.bfloat16))), scale_dtype)
    assert stored["layers.0.linear_attn.in_proj_qkv.weight_scale_inv"].shape == (1, 2)
    folder = write_folder(
        tmp_path,
        nested_config(config, quantization_config=FP8_SCHEME, tie_word_embeddings=tied),
        prefixed(stored, prefix),
        shards=2,
    )
    checkpoint = assert_loads(folder, expanded(stored), exact_dtype=False)
    assert checkpoint.config.fp8
    weight = checkpoint.weight("layers.3.self_attn.q_proj.weight")
    assert weight.data.dtype == torch.float8_e4m3fn
    assert weight.scale_inv is not None
    assert weight.scale_inv.dtype == scale_dtype


def test_fp8_with_some_matrices_left_in_bf16(tmp_path: Path) -> None:
    stored = quantized(split_experts(fused_state(model_of(text_config(), torch.bfloat16))), torch.bfloat16)
    name = "layers.1.mlp.shared_expert.up_proj.weight"
    stored[name] = dequantized(stored[name], stored.pop(name + "_scale_inv")).bfloat16()
    config = nested_config(text_config(), quantization_config=FP8_SCHEME)
    assert_loads(
        write_folder(tmp_path, config, prefixed(stored, OFFICIAL)), expanded(stored), exact_dtype=False
    )


def test_small_tensors_may_be_f32_in_a_bf16_release(tmp_path: Path) -> None:
    state = fused_state(model_of(text_config(), torch.bfloat16))
    for name in state:
        if name.endswith(("A_log", "dt_bias", "linear_attn.norm.weight")):
            state[name] = state[name].float()
    assert_loads(write_folder(tmp_path, flat_config(text_config()), prefixed(state, TEXT_ONLY)), state)


@pytest.mark.parametrize("fused", [False, True])
def test_mtp_and_vision_are_known_and_counted(tmp_path: Path, fused: bool) -> None:
    state = fused_state(model_of(text_config(), torch.bfloat16))
    experts = {
        "mtp.layers.0.mlp.experts.gate_up_proj": torch.ones(EXPERTS, 2, 2),
        "mtp.layers.0.mlp.experts.down_proj": torch.ones(EXPERTS, 2, 2),
    }
    per_expert = {f"mtp.layers.0.mlp.experts.{e}.up_proj.weight": torch.ones(2, 2) for e in range(EXPERTS)}
    extra = {
        "mtp.fc.weight": torch.ones(2, 4),
        "model.visual.patch_embed.proj.weight": torch.ones(2, 2, dtype=torch.float16),
        **(experts if fused else per_expert),
    }
    # fused text experts with per-expert MTP, and the other way round: the text part alone decides
    text = split_experts(state) if fused else state
    folder = write_folder(tmp_path, flat_config(text_config()), prefixed(text, TEXT_ONLY) | extra)
    checkpoint = assert_loads(folder, state)
    assert checkpoint.layout.fused_experts != fused
    assert checkpoint.ignored() == {"mtp": 3 if fused else 1 + EXPERTS, "vision": 1}


def test_a_stored_lm_head_is_used_though_the_config_says_tied(tmp_path: Path) -> None:
    # transformers does the same when the two differ
    state = fused_state(model_of(text_config()))
    config = flat_config(text_config(), tie_word_embeddings=True)
    folder = write_folder(tmp_path, config, prefixed(state, TEXT_ONLY))
    checkpoint = assert_loads(folder, state)
    assert not checkpoint.config.tie_word_embeddings
    with torch.no_grad():
        theirs = Qwen3_5MoeForCausalLM.from_pretrained(folder).lm_head.weight
    assert torch.equal(checkpoint.tensor("lm_head.weight"), theirs.detach())


@pytest.mark.parametrize(
    "forgotten", ["norm.weight", "layers.2.mlp.gate.weight", "layers.0.linear_attn.A_log"]
)
def test_a_tensor_that_was_never_read_is_named(tmp_path: Path, forgotten: str) -> None:
    state = fused_state(model_of(text_config()))
    checkpoint = Checkpoint.open(
        write_folder(tmp_path, flat_config(text_config()), prefixed(state, TEXT_ONLY))
    )
    for name in state:
        if name != forgotten and ".mlp.experts." not in name:
            checkpoint.tensor(name)
    with pytest.raises(CheckpointError, match=rf"model\.{forgotten} was never used$"):
        checkpoint.assert_text_tensors_used()


def test_an_untied_model_without_lm_head_is_refused(tmp_path: Path) -> None:
    state = fused_state(model_of(text_config()))
    del state["lm_head.weight"]
    folder = write_folder(tmp_path, flat_config(text_config()), prefixed(state, TEXT_ONLY))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight \[40, 144\] is missing"):
        Checkpoint.open(folder)


def test_shards_may_be_links_into_a_hub_cache(tmp_path: Path) -> None:
    state = fused_state(model_of(text_config()))
    folder = write_folder(tmp_path / "snapshot", flat_config(text_config()), prefixed(state, TEXT_ONLY), 2)
    (tmp_path / "blobs").mkdir()
    for number, file in enumerate(sorted(folder.iterdir())):
        blob = tmp_path / "blobs" / f"{number:064x}"
        shutil.move(file, blob)
        file.symlink_to(blob)
    assert_loads(folder, state)


def test_the_table_lists_exactly_what_transformers_has(tmp_path: Path) -> None:
    for tied in (False, True):
        model = model_of(text_config(tie_word_embeddings=tied))
        state = fused_state(model)
        folder = write_folder(tmp_path / str(tied), flat_config(model.config), prefixed(state, TEXT_ONLY))
        checkpoint = Checkpoint.open(folder)
        table = {spec.name: spec.shape for spec in expected_tensors(checkpoint.config, checkpoint.layout)}
        assert table == {name: tuple(tensor.shape) for name, tensor in state.items()}


def test_expert_views_are_not_copies_and_tensors_are(tmp_path: Path) -> None:
    state = fused_state(model_of(text_config(), torch.bfloat16))
    checkpoint = Checkpoint.open(
        write_folder(tmp_path, flat_config(text_config()), prefixed(state, TEXT_ONLY))
    )
    first, second = checkpoint.expert(0, 1), checkpoint.expert(0, 1)
    assert first.up.data.data_ptr() == second.up.data.data_ptr()
    a, b = checkpoint.tensor("norm.weight"), checkpoint.tensor("norm.weight")
    assert a.data_ptr() != b.data_ptr()
    a.add_(1)
    assert not torch.equal(a, b)


def test_writing_into_a_view_never_reaches_the_file(tmp_path: Path) -> None:
    state = fused_state(model_of(text_config(), torch.bfloat16))
    folder = write_folder(tmp_path, flat_config(text_config()), prefixed(state, TEXT_ONLY))
    before = (folder / "model.safetensors").read_bytes()
    Checkpoint.open(folder).expert(0, 0).gate.data.zero_()
    assert (folder / "model.safetensors").read_bytes() == before


def test_a_nan_code_is_refused_wherever_it_is_read(tmp_path: Path) -> None:
    stored = quantized(split_experts(fused_state(model_of(text_config()))), torch.float32)
    for name in ("layers.3.self_attn.k_proj.weight", "layers.2.mlp.experts.1.down_proj.weight"):
        codes: Tensor = stored[name].view(torch.uint8)
        codes[1, 2] = 0xFF
    config = nested_config(text_config(), quantization_config=FP8_SCHEME)
    checkpoint = Checkpoint.open(write_folder(tmp_path, config, prefixed(stored, OFFICIAL)))
    for read in (checkpoint.weight, checkpoint.tensor):
        with pytest.raises(CheckpointError, match=r"layers\.3\.self_attn\.k_proj\.weight holds the NaN code"):
            read("layers.3.self_attn.k_proj.weight")
    with pytest.raises(CheckpointError, match=r"experts\.1\.down_proj\.weight holds the NaN code"):
        checkpoint.expert(2, 1).down.expand()


def test_infinity_in_a_dense_tensor_is_refused_where_it_is_read(tmp_path: Path) -> None:
    state = fused_state(model_of(text_config(), torch.bfloat16))
    for name in ("embed_tokens.weight", "layers.0.input_layernorm.weight"):
        damaged = state | {name: state[name].clone()}
        damaged[name].view(-1)[-1] = float("inf")
        folder = write_folder(tmp_path / name, flat_config(text_config()), prefixed(damaged, TEXT_ONLY))
        checkpoint = Checkpoint.open(folder)
        with pytest.raises(CheckpointError, match=f"{name} holds NaN or infinity"):
            checkpoint.tensor(name)


def test_asking_for_an_unknown_name_is_an_error_not_a_crash(tmp_path: Path) -> None:
    state = fused_state(model_of(text_config()))
    checkpoint = Checkpoint.open(
        write_folder(tmp_path, flat_config(text_config()), prefixed(state, TEXT_ONLY))
    )
    with pytest.raises(CheckpointError, match=r"has no tensor model\.layers\.9\.x"):
        checkpoint.tensor("layers.9.x")


def test_an_index_of_one_file_loads(tmp_path: Path) -> None:
    # mlx-lm writes model.safetensors and an index that names it
    state = fused_state(model_of(text_config()))
    folder = write_folder(tmp_path, flat_config(text_config()), prefixed(state, TEXT_ONLY))
    homes = dict.fromkeys(prefixed(state, TEXT_ONLY), "model.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": homes}))
    assert_loads(folder, state)
