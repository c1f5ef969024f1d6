"""The official 35B layout, 42 shards with real headers over sparse files: quick to open, nothing read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from math import prod
from pathlib import Path

import pytest

from huorn.checkpoint.reader import Checkpoint
from huorn.errors import CheckpointError

from .folders import FP8_SCHEME
from .test_config import RELEASE

ITEM_BYTES = {"BF16": 2, "F8_E4M3": 1}
Table = dict[str, tuple[str, tuple[int, ...]]]


def release_tensors() -> Table:
    """Every text and MTP tensor as checkpoint.md lists them (not from huorn's own table), and 333 vision ones."""
    table: Table = {}

    def bf16(name: str, *shape: int) -> None:
        table[name] = ("BF16", shape)

    def f8(name: str, rows: int, columns: int) -> None:
        table[name] = ("F8_E4M3", (rows, columns))
        table[name + "_scale_inv"] = ("BF16", (-(-rows // 128), -(-columns // 128)))

    def layer(p: str, full: bool) -> None:
        bf16(p + "input_layernorm.weight", 2048)
        bf16(p + "post_attention_layernorm.weight", 2048)
        bf16(p + "mlp.gate.weight", 256, 2048)
        bf16(p + "mlp.shared_expert_gate.weight", 1, 2048)
        for expert in ["shared_expert", *(f"experts.{e}" for e in range(256))]:
            f8(f"{p}mlp.{expert}.gate_proj.weight", 512, 2048)
            f8(f"{p}mlp.{expert}.up_proj.weight", 512, 2048)
            f8(f"{p}mlp.{expert}.down_proj.weight", 2048, 512)
        if full:
            f8(p + "self_attn.q_proj.weight", 8192, 2048)
            f8(p + "self_attn.k_proj.weight", 512, 2048)
            f8(p + "self_attn.v_proj.weight", 512, 2048)
            f8(p + "self_attn.o_proj.weight", 2048, 4096)
            bf16(p + "self_attn.q_norm.weight", 256)
            bf16(p + "self_attn.k_norm.weight", 256)
        else:
            f8(p + "linear_attn.in_proj_qkv.weight", 8192, 2048)
            f8(p + "linear_attn.in_proj_z.weight", 4096, 2048)
            bf16(p + "linear_attn.in_proj_a.weight", 32, 2048)
            bf16(p + "linear_attn.in_proj_b.weight", 32, 2048)
            bf16(p + "linear_attn.conv1d.weight", 8192, 1, 4)
            bf16(p + "linear_attn.A_log", 32)
            bf16(p + "linear_attn.dt_bias", 32)
            bf16(p + "linear_attn.norm.weight", 128)
            f8(p + "linear_attn.out_proj.weight", 2048, 4096)

    bf16("model.language_model.embed_tokens.weight", 248320, 2048)
    for n in range(40):
        layer(f"model.language_model.layers.{n}.", n % 4 == 3)
    bf16("model.language_model.norm.weight", 2048)
    bf16("lm_head.weight", 248320, 2048)
    layer("mtp.layers.0.", True)
    bf16("mtp.fc.weight", 2048, 4096)
    for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        bf16(f"mtp.{name}.weight", 2048)
    for n in range(333):
        bf16(f"model.visual.blocks.{n}.weight", 8)
    return table


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("release")
    table = release_tensors()
    names, shards = list(table), 42
    homes: dict[str, str] = {}
    for number in range(shards):
        file = f"model.safetensors-{number + 1:05d}-of-{shards:05d}.safetensors"
        header, offset = {}, 0
        for name in names[len(names) * number // shards : len(names) * (number + 1) // shards]:
            dtype, shape = table[name]
            size = prod(shape) * ITEM_BYTES[dtype]
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + size]}
            offset += size
            homes[name] = file
        text = json.dumps(header).encode()
        with (directory / file).open("wb") as handle:
            handle.write(len(text).to_bytes(8, "little") + text)
            handle.truncate(8 + len(text) + offset)  # sparse: takes no room on disk
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": homes}))
    config = {"model_type": "qwen3_5_moe", "text_config": RELEASE, "quantization_config": FP8_SCHEME}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


OPEN_AND_MEASURE = """
import json, resource, sys, time
from pathlib import Path
from huorn.checkpoint.reader import Checkpoint
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
seconds = []
for _ in range(3):
    started = time.process_time()  # a busy machine stretches wall time more than this
    Checkpoint.open(Path(sys.argv[1]))
    seconds.append(time.process_time() - started)
grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
print(json.dumps([min(seconds), grown]))
"""


def test_opening_takes_under_two_seconds_and_reads_no_tensor(release: Path) -> None:
    # in a process of its own: here the garbage collector would walk what transformers left, and double the time
    opening = subprocess.run(
        [sys.executable, "-c", OPEN_AND_MEASURE, str(release)], check=True, capture_output=True, text=True
    )
    seconds, grown = json.loads(opening.stdout)
    assert seconds < 2
    assert grown < 256 * 2**20  # names and offsets; the tensors of one shard alone would be 900 MiB


def test_the_release_is_told_apart_and_counted(release: Path) -> None:
    checkpoint = Checkpoint.open(release)
    assert len(checkpoint.infos) == 64_196
    assert checkpoint.ignored() == {"mtp": 1_560, "vision": 333}
    assert checkpoint.layout.prefix == "model.language_model."
    assert not checkpoint.layout.fused_experts


def test_an_expert_is_mapped_and_a_tensor_costs_its_own_size(release: Path) -> None:
    checkpoint = Checkpoint.open(release)
    before = resident_bytes()
    for layer in range(40):
        expert = checkpoint.expert(layer, 255)
        assert (expert.gate.shape, expert.down.shape) == ((512, 2048), (2048, 512))
        assert expert.gate.nbytes + expert.up.nbytes + expert.down.nbytes == 3 * 2**20 + 384
    assert resident_bytes() - before < 8 * 2**20  # 120 MiB of experts, only looked at
    weight = checkpoint.weight("layers.0.linear_attn.in_proj_qkv.weight")
    assert weight.nbytes == 2**24 + 64 * 16 * 2
    assert resident_bytes() - before < 8 * 2**20 + 2 * weight.nbytes  # the check for NaN codes masks a copy


def test_one_missing_shard_of_42_is_named(release: Path) -> None:
    shard = release / "model.safetensors-00007-of-00042.safetensors"
    hidden = shard.rename(release / "hidden")
    try:
        with pytest.raises(
            CheckpointError, match=r"00007-of-00042\.safetensors is missing; the index puts model\."
        ):
            Checkpoint.open(release)
    finally:
        hidden.rename(shard)
