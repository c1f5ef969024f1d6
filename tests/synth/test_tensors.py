"""Names, shapes and sizes against the figures known of the releases."""

from __future__ import annotations

import pytest

from huorn.synth.presets import find_preset
from huorn.synth.tensors import BF16_SHARD_BYTES, SynthTensor, mtp_tensors, shards, text_tensors

FP8 = find_preset("qwen3.5-35b-a3b-fp8").config
BF16 = find_preset("qwen3.5-35b-a3b-bf16").config
P = "model.language_model."


@pytest.fixture(scope="module")
def fp8_shards() -> dict[str, list[SynthTensor]]:
    return shards(FP8)


@pytest.fixture(scope="module")
def fp8(fp8_shards: dict[str, list[SynthTensor]]) -> dict[str, SynthTensor]:
    return {tensor.name: tensor for tensors in fp8_shards.values() for tensor in tensors}


def test_counts_of_the_fp8_release() -> None:
    assert len(list(text_tensors(FP8))) == 62_303
    assert len(list(mtp_tensors(FP8))) == 1_560


def test_42_shards_one_per_layer(fp8_shards: dict[str, list[SynthTensor]]) -> None:
    assert set(fp8_shards) == {
        *(f"layers-{n}.safetensors" for n in range(40)),
        "mtp.safetensors",
        "outside.safetensors",
    }
    assert [t.name for t in fp8_shards["outside.safetensors"]] == [
        "lm_head.weight", f"{P}embed_tokens.weight", f"{P}norm.weight"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "dtype", "shape"),
    [
        (f"{P}embed_tokens.weight", "BF16", (248320, 2048)),
        ("lm_head.weight", "BF16", (248320, 2048)),
        (f"{P}norm.weight", "BF16", (2048,)),
        (f"{P}layers.0.input_layernorm.weight", "BF16", (2048,)),
        (f"{P}layers.39.mlp.gate.weight", "BF16", (256, 2048)),
        (f"{P}layers.7.mlp.experts.255.up_proj.weight", "F8_E4M3", (512, 2048)),
        (f"{P}layers.7.mlp.experts.255.up_proj.weight_scale_inv", "BF16", (4, 16)),
        (f"{P}layers.7.mlp.experts.0.down_proj.weight", "F8_E4M3", (2048, 512)),
        (f"{P}layers.7.mlp.experts.0.down_proj.weight_scale_inv", "BF16", (16, 4)),
        (f"{P}layers.2.mlp.shared_expert.gate_proj.weight", "F8_E4M3", (512, 2048)),
        (f"{P}layers.2.mlp.shared_expert_gate.weight", "BF16", (1, 2048)),
        (f"{P}layers.2.linear_attn.in_proj_qkv.weight", "F8_E4M3", (8192, 2048)),
        (f"{P}layers.2.linear_attn.in_proj_z.weight", "F8_E4M3", (4096, 2048)),
        (f"{P}layers.2.linear_attn.in_proj_a.weight", "BF16", (32, 2048)),
        (f"{P}layers.2.linear_attn.conv1d.weight", "BF16", (8192, 1, 4)),
        (f"{P}layers.2.linear_attn.A_log", "F32", (32,)),
        (f"{P}layers.2.linear_attn.dt_bias", "BF16", (32,)),
        (f"{P}layers.2.linear_attn.norm.weight", "F32", (128,)),
        (f"{P}layers.2.linear_attn.out_proj.weight", "F8_E4M3", (2048, 4096)),
        (f"{P}layers.3.self_attn.q_proj.weight", "F8_E4M3", (8192, 2048)),
        (f"{P}layers.3.self_attn.k_proj.weight", "F8_E4M3", (512, 2048)),
        (f"{P}layers.3.self_attn.o_proj.weight", "F8_E4M3", (2048, 4096)),
        (f"{P}layers.3.self_attn.q_norm.weight", "BF16", (256,)),
        ("mtp.fc.weight", "BF16", (2048, 4096)),
        ("mtp.norm.weight", "BF16", (2048,)),
        ("mtp.layers.0.self_attn.v_proj.weight", "F8_E4M3", (512, 2048)),
    ],
)
def test_tensor_of_the_release(
    fp8: dict[str, SynthTensor], name: str, dtype: str, shape: tuple[int, ...]
) -> None:
    assert (fp8[name].values.dtype, fp8[name].shape) == (dtype, shape)


def test_sizes_of_the_release(fp8: dict[str, SynthTensor]) -> None:
    expert = [t.nbytes for name, t in fp8.items() if f"{P}layers.5.mlp.experts.17." in name]
    assert sum(expert) == 2_097_152 + 1_048_576 + 384
    experts = sum(t.nbytes for name, t in fp8.items() if ".experts." in name and not name.startswith("mtp."))
    assert experts / 2**30 == pytest.approx(30.0, abs=0.05)
    # 37.5 GB less 0.9 GB of vision, which is left out.
    assert sum(t.nbytes for t in fp8.values()) / 1e9 == pytest.approx(36.6, abs=0.2)


def test_matrices_of_an_expert_lie_side_by_side(fp8_shards: dict[str, list[SynthTensor]]) -> None:
    names = [t.name for t in fp8_shards["layers-0.safetensors"]]
    first = names.index(f"{P}layers.0.mlp.experts.12.down_proj.weight")
    assert [name.split(".")[-2] for name in names[first : first + 3]] == ["down_proj", "gate_proj", "up_proj"]


def test_bf16_release_is_fused_and_in_shards_of_five_gigabytes() -> None:
    files = shards(BF16)
    tensors = {t.name: t for group in files.values() for t in group}
    assert tensors[f"{P}layers.0.mlp.experts.gate_up_proj"].shape == (256, 1024, 2048)
    assert tensors[f"{P}layers.0.mlp.experts.down_proj"].shape == (256, 2048, 512)
    assert not any("scale" in name for name in tensors)
    assert {t.values.dtype for t in tensors.values()} == {"BF16", "F32"}
    assert all(sum(t.nbytes for t in group) <= BF16_SHARD_BYTES for group in files.values())
    count = len(files)
    assert list(files) == [f"model.safetensors-{n:05}-of-{count:05}.safetensors" for n in range(1, count + 1)]
