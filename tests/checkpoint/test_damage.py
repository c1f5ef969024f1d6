"""Damaged folders: one clear line and CheckpointError, never another error, never a wrong load."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from huorn.checkpoint.reader import Checkpoint
from huorn.errors import CheckpointError

from .folders import (
    FP8_SCHEME,
    INDEX,
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

SINGLE = "model.safetensors"
FIRST = "model-00001-of-00003.safetensors"
SMALL = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}


@dataclass(frozen=True)
class Sample:
    """A good folder, and the bytes of every text tensor in it."""

    directory: Path
    tensors: dict[str, bytes] = field(repr=False)


def load_all(directory: Path) -> dict[str, bytes]:
    """Every tensor that a decoder would be given: name -> dtype, shape and bytes."""
    checkpoint = Checkpoint.open(directory)
    loaded = {}
    for name, info in checkpoint.infos.items():
        if name.startswith(("model.language_model.", "lm_head.")):
            tensor = checkpoint._files[info.file].read(name)
            raw = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
            loaded[name] = f"{info.dtype} {info.shape} ".encode() + raw
    return loaded


def make_sample(directory: Path, shards: int) -> Sample:
    config = text_config(**SMALL)
    stored = quantized(split_experts(fused_state(model_of(config, torch.bfloat16))), torch.bfloat16)
    tensors = prefixed(stored, "model.language_model.") | {"mtp.fc.weight": torch.ones(2, 2)}
    write_folder(directory, nested_config(config, quantization_config=FP8_SCHEME), tensors, shards)
    return Sample(directory, load_all(directory))


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Sample:
    return make_sample(tmp_path_factory.mktemp("single"), shards=1)


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Sample:
    return make_sample(tmp_path_factory.mktemp("sharded"), shards=3)


@pytest.fixture
def folder(sharded: Sample, tmp_path: Path) -> Path:
    """A copy of the sharded sample, to be damaged."""
    return shutil.copytree(sharded.directory, tmp_path / "copy")


def assert_refused(directory: Path, message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        Checkpoint.open(directory)
    assert str(caught.value).isprintable(), "one line"
    assert len(str(caught.value)) < 700


def edit_index(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def edit_shard(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Changes the tensors of the first shard; the index stays as it is."""
    tensors = load_file(folder / FIRST)
    change(tensors)
    save_file(tensors, folder / FIRST)


def first_tensor(folder: Path) -> str:
    homes = json.loads((folder / INDEX).read_text())["weight_map"]
    return next(n for n, file in homes.items() if file == FIRST and n.endswith("layernorm.weight"))


def test_a_truncated_shard(folder: Path) -> None:
    content = (folder / FIRST).read_bytes()
    for size in (len(content) - 1, len(content) // 2, 100, 8, 3, 0):
        (folder / FIRST).write_bytes(content[:size])
        assert_refused(folder, FIRST)


def test_a_missing_shard_is_named_with_a_tensor(folder: Path) -> None:
    (folder / FIRST).unlink()
    assert_refused(folder, rf"{FIRST} is missing; the index puts \S+ there")


def test_a_shard_that_is_a_folder(folder: Path) -> None:
    (folder / FIRST).unlink()
    (folder / FIRST).mkdir()
    assert_refused(folder, rf"{FIRST} is not a regular file")


def test_a_dangling_link_is_a_missing_shard(folder: Path) -> None:
    (folder / FIRST).unlink()
    (folder / FIRST).symlink_to(folder / "gone")
    assert_refused(folder, rf"{FIRST} is missing")


def test_a_git_lfs_pointer_in_place_of_a_shard(folder: Path) -> None:
    (folder / FIRST).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0f\nsize 4967\n")
    assert_refused(folder, rf"{FIRST} is a Git LFS pointer")


def test_a_gguf_file_in_place_of_a_shard(folder: Path) -> None:
    (folder / FIRST).write_bytes(b"GGUF" + bytes(60))
    assert_refused(folder, rf"{FIRST} is a GGUF file")


@pytest.mark.parametrize(
    "outside",
    [
        f"../copy/{FIRST}", f"../{FIRST}", f"./{FIRST}", f"/etc/{FIRST}", f"a\\{FIRST}", "..", "", "C:x.safetensors",
        ".x.safetensors", "x\0.safetensors", "x\n.safetensors", "config.json", "é\ud800.safetensors",
    ],
)  # fmt: skip
def test_an_index_that_leaves_the_folder(folder: Path, outside: str) -> None:
    edit_index(folder, lambda homes: homes.update(dict.fromkeys(homes, outside)))
    assert_refused(folder, "a shard is a plain")


@pytest.mark.parametrize("value", [None, 3, ["x.safetensors"], {}, True])
def test_an_index_with_a_value_that_is_no_name(folder: Path, value: object) -> None:
    edit_index(folder, lambda homes: homes.update({next(iter(homes)): value}))
    assert_refused(folder, "which is no file name")


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"weight_map": {}}', '{"weight_map": []}', "[" * 99999])
def test_a_damaged_index(folder: Path, content: str) -> None:
    (folder / INDEX).write_text(content)
    assert_refused(folder, r"index\.json")


def test_an_index_that_promises_more_than_the_shard_holds(folder: Path) -> None:
    edit_index(folder, lambda homes: homes.update({"model.language_model.more": FIRST}))
    assert_refused(folder, rf"{FIRST} does not hold model\.language_model\.more")


def test_an_index_that_forgets_a_tensor(folder: Path) -> None:
    name = first_tensor(folder)
    edit_index(folder, lambda homes: homes.pop(name))
    assert_refused(folder, rf"{FIRST} holds {name}, which the index does not put there")


def test_an_index_beside_a_stale_single_file(folder: Path) -> None:
    shutil.copy(folder / FIRST, folder / SINGLE)
    assert_refused(folder, "remove the stale one")


def test_a_missing_tensor(folder: Path) -> None:
    name = first_tensor(folder)
    edit_shard(folder, lambda tensors: tensors.pop(name))
    edit_index(folder, lambda homes: homes.pop(name))
    assert_refused(folder, rf"{name} \[144\] is missing")


def test_an_unknown_tensor(folder: Path) -> None:
    edit_shard(folder, lambda tensors: tensors.update({"model.language_model.extra.bias": torch.ones(3)}))
    edit_index(folder, lambda homes: homes.update({"model.language_model.extra.bias": FIRST}))
    assert_refused(
        folder, rf"{FIRST}: model\.language_model\.extra\.bias F32 \[3\] is no tensor of this model"
    )


def test_a_tensor_of_another_shape(folder: Path) -> None:
    name = first_tensor(folder)
    edit_shard(folder, lambda tensors: tensors.update({name: torch.ones(143)}))
    assert_refused(folder, rf"{FIRST}: {name} has shape \[143\], but config\.json asks for \[144\]")


@pytest.mark.parametrize("dtype", [torch.float16, torch.int8, torch.float64, torch.float8_e5m2])
def test_a_tensor_of_another_dtype(folder: Path, dtype: torch.dtype) -> None:
    name = first_tensor(folder)
    edit_shard(folder, lambda tensors: tensors.update({name: tensors[name].to(dtype)}))
    assert_refused(folder, rf"{name} is \w+, but it must be BF16 or F32")


def test_a_norm_in_fp8(folder: Path) -> None:
    name = first_tensor(folder)
    edit_shard(folder, lambda tensors: tensors.update({name: tensors[name].to(torch.float8_e4m3fn)}))
    assert_refused(folder, rf"{name} is F8_E4M3, but it must be BF16 or F32")


def change_single(sample: Sample, target: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> Path:
    shutil.copytree(sample.directory, target, dirs_exist_ok=True)
    tensors = load_file(target / SINGLE)
    change(tensors)
    save_file(tensors, target / SINGLE)
    return target


Q_PROJ = "model.language_model.layers.1.self_attn.q_proj.weight"


def test_codes_without_scales(single: Sample, tmp_path: Path) -> None:
    change_single(single, tmp_path, lambda tensors: tensors.pop(Q_PROJ + "_scale_inv"))
    assert_refused(tmp_path, rf"{Q_PROJ}_scale_inv \[1, 2\] is missing")


def test_scales_without_codes(single: Sample, tmp_path: Path) -> None:
    change_single(single, tmp_path, lambda tensors: tensors.update({Q_PROJ: tensors[Q_PROJ].bfloat16()}))
    assert_refused(tmp_path, rf"{Q_PROJ}_scale_inv BF16 \[1, 2\] is no tensor of this model")


def test_scales_of_another_shape(single: Sample, tmp_path: Path) -> None:
    change_single(single, tmp_path, lambda tensors: tensors.update({Q_PROJ + "_scale_inv": torch.ones(2, 1)}))
    assert_refused(tmp_path, rf"{Q_PROJ}_scale_inv has shape \[2, 1\]")


def test_fp8_codes_that_the_config_does_not_announce(single: Sample, tmp_path: Path) -> None:
    shutil.copytree(single.directory, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert_refused(tmp_path, "is F8_E4M3, but it must be BF16 or F32 .config.json has no quantization_config")


@pytest.mark.parametrize(
    ("suffix", "scheme"),
    [
        ("weight_scale", "compressed-tensors"), ("weight_packed", "compressed-tensors"), ("qweight", "GPTQ or AWQ"),
        ("qzeros", "GPTQ or AWQ"), ("g_idx", "GPTQ"), ("weight_scale_2", "NVFP4"), ("input_scale", "static"),
    ],
)  # fmt: skip
def test_a_scheme_that_only_tensor_names_betray(
    single: Sample, tmp_path: Path, suffix: str, scheme: str
) -> None:
    stem = Q_PROJ.removesuffix("weight")
    change_single(single, tmp_path, lambda tensors: tensors.update({stem + suffix: torch.ones(3)}))
    assert_refused(tmp_path, rf"scheme .*{scheme}.*not supported; huorn opens BF16, F32 and FP8")


def test_fused_experts_in_fp8(tmp_path: Path) -> None:
    state = fused_state(model_of(text_config()))
    name = "layers.0.mlp.experts.gate_up_proj"
    state[name] = state[name].to(torch.float8_e4m3fn)
    config = flat_config(text_config(), quantization_config=FP8_SCHEME)
    write_folder(tmp_path, config, prefixed(state, "model."))
    assert_refused(tmp_path, rf"{name} is F8_E4M3, but it must be BF16 or F32")


def test_one_layer_fused_and_another_not(tmp_path: Path) -> None:
    state = fused_state(model_of(text_config()))
    mixed = {n: t for n, t in state.items() if not n.startswith("layers.0.mlp.experts.")}
    mixed |= {n: t for n, t in split_experts(state).items() if n.startswith("layers.0.mlp.experts.")}
    write_folder(tmp_path, flat_config(text_config()), prefixed(mixed, "model."))
    assert_refused(tmp_path, r"layers\.0\.mlp\.experts\.gate_up_proj \[3, 40, 144\] is missing")


def test_unknown_and_doubled_prefixes(tmp_path: Path) -> None:
    state = fused_state(model_of(text_config()))
    write_folder(tmp_path / "a", flat_config(text_config()), prefixed(state, "language_model.model."))
    assert_refused(tmp_path / "a", "holds neither")
    both = prefixed(state, "model.") | prefixed(state, "model.language_model.")
    write_folder(tmp_path / "b", flat_config(text_config()), both)
    assert_refused(tmp_path / "b", "holds both")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([], "is empty"),
        (["model-Q4_K_M.gguf"], r"holds GGUF files \(model-Q4_K_M\.gguf\)"),
        (["config.json", "pytorch_model.bin"], "pickled weights"),
        (["config.json", "model-00001-of-00002.safetensors"], r"but no model\.safetensors\.index\.json"),
        (["config.json", "tokenizer.json"], "has neither"),
        ([SINGLE], "has no config.json"),
        (["bank_loader.py", "config.json", SINGLE, "manifest.json"], "bank of expert predictors"),
    ],
)
def test_a_folder_of_another_kind(tmp_path: Path, files: list[str], message: str) -> None:
    for name in files:
        (tmp_path / name).write_bytes(b"{}")
    assert_refused(tmp_path, message)


def test_a_path_that_is_no_folder(tmp_path: Path) -> None:
    assert_refused(tmp_path / "nothing", "does not exist")
    assert_refused(tmp_path / "nul\0byte", "does not exist")
    assert_refused(tmp_path / ("x" * 300), "can not be opened")
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    assert_refused(tmp_path / "model.gguf", "is a GGUF file")
    (tmp_path / SINGLE).write_bytes(b"{}")
    assert_refused(tmp_path / SINGLE, "is a file, not a folder")


# --- fuzzing: whatever is done to header, index or length, the load is refused or right


def fuzz(sample: Sample, name: str, content: bytes) -> bool:
    """Opens the sample with another `content` of one file: True when it loads, and then it must load right."""
    path = sample.directory / name
    original = path.read_bytes()
    try:
        path.write_bytes(content)
        loaded = load_all(sample.directory)
    except CheckpointError:
        return False
    finally:
        path.write_bytes(original)
    different = [tensor for tensor in sample.tensors if loaded.get(tensor) != sample.tensors[tensor]]
    assert different == []
    assert loaded.keys() == sample.tensors.keys()
    return True


def header_end(content: bytes) -> int:
    return 8 + int.from_bytes(content[:8], "little")


def test_the_fuzzed_samples_load(single: Sample, sharded: Sample) -> None:
    assert fuzz(single, SINGLE, (single.directory / SINGLE).read_bytes())
    assert fuzz(sharded, INDEX, (sharded.directory / INDEX).read_bytes())


@settings(max_examples=250, deadline=None, derandomize=True)
@given(data=st.data())
def test_flipped_bytes_in_a_header(single: Sample, data: st.DataObject) -> None:
    content = bytearray((single.directory / SINGLE).read_bytes())
    places = st.integers(0, 15) | st.integers(0, header_end(content) - 1)
    for place in data.draw(st.lists(places, min_size=1, max_size=3)):
        content[place] = data.draw(st.integers(0, 255) | st.sampled_from(list(b'0123456789"{}[],:BF')))
    fuzz(single, SINGLE, bytes(content))


@settings(max_examples=80, deadline=None, derandomize=True)
@given(data=st.data(), added=st.binary(max_size=40), cut=st.integers(0, 40))
def test_bytes_cut_out_of_a_header_or_put_in(
    single: Sample, data: st.DataObject, added: bytes, cut: int
) -> None:
    content = (single.directory / SINGLE).read_bytes()
    start = data.draw(st.integers(0, header_end(content) - cut))
    fuzz(single, SINGLE, content[:start] + added + content[start + cut :])


@settings(max_examples=80, deadline=None, derandomize=True)
@given(data=st.data(), name=st.sampled_from([SINGLE, "config.json"]))
def test_files_of_another_length(single: Sample, data: st.DataObject, name: str) -> None:
    content = (single.directory / name).read_bytes()
    size = data.draw(st.integers(0, 200) | st.integers(0, len(content) - 1))
    assert not fuzz(single, name, content[:size])
    assert not fuzz(single, name, content + b"}" * data.draw(st.integers(1, 9)))


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    data=st.data(), part=st.sampled_from(["entry", "dtype", "shape", "data_offsets", "rename", "transpose"])
)
def test_header_entries_of_any_form(single: Sample, data: st.DataObject, part: str) -> None:
    content = (single.directory / SINGLE).read_bytes()
    end = header_end(content)
    header = json.loads(content[8:end])
    name = data.draw(st.sampled_from([name for name in header if name != "__metadata__"]))
    if part == "rename":
        header[data.draw(st.text(max_size=10))] = header.pop(name)
    elif part == "transpose":
        header[name]["shape"].reverse()
    elif part == "entry":
        header[name] = data.draw(anything)
    else:
        header[name][part] = data.draw(anything)
    text = json.dumps(header).encode()
    fuzz(single, SINGLE, len(text).to_bytes(8, "little") + text + content[end:])


@settings(max_examples=200, deadline=None, derandomize=True)
@given(data=st.data())
def test_flipped_bytes_in_an_index(sharded: Sample, data: st.DataObject) -> None:
    content = bytearray((sharded.directory / INDEX).read_bytes())
    for place in data.draw(st.lists(st.integers(0, len(content) - 1), min_size=1, max_size=3)):
        content[place] = data.draw(st.integers(0, 255) | st.sampled_from(list(b'0123456789"{}[],:./\\')))
    fuzz(sharded, INDEX, bytes(content))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    data=st.data(), value=anything | st.sampled_from(["../x.safetensors", FIRST, SINGLE, "config.json", "."])
)
def test_index_entries_of_any_form(sharded: Sample, data: st.DataObject, value: object) -> None:
    index = json.loads((sharded.directory / INDEX).read_text())
    if data.draw(st.booleans()):
        index["weight_map"][data.draw(st.sampled_from(list(index["weight_map"])))] = value
    else:
        index["weight_map"] = value
    fuzz(sharded, INDEX, json.dumps(index).encode())


@settings(max_examples=100, deadline=None, derandomize=True)
@given(data=st.data(), value=st.integers(0, 255))
def test_flipped_bytes_in_a_config(single: Sample, data: st.DataObject, value: int) -> None:
    # sizes are held against the tensors; a changed rope_theta can not be told from a right one
    content = bytearray((single.directory / "config.json").read_bytes())
    content[data.draw(st.integers(0, len(content) - 1))] = value
    fuzz(single, "config.json", bytes(content))
