"""Whole runs: the layout that loaders expect, the same bytes each time, and what happens when one is cut short."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import shutil
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from huorn.checkpoint.config import ModelConfig
from huorn.checkpoint.reader import Checkpoint
from huorn.checkpoint.verify import verify
from huorn.errors import CheckpointError, UsageError
from huorn.synth import disk_writer
from huorn.synth.presets import find_preset
from huorn.synth.synthesize import synthesize
from huorn.synth.tensors import SynthTensor

PRESET = "tiny-fp8"
MODULE = importlib.import_module(
    "huorn.synth.synthesize"
)  # its function of that name hides it in the package


def quiet(done: int, total: int) -> None:
    """Progress that nobody looks at."""


def make(out: Path, layers: int | None = 2, seed: int = 3, **options: bool) -> Path:
    synthesize(PRESET, out, layers, seed, quiet, **options)
    return out


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("synth") / "model")


def test_opens_as_a_checkpoint_that_says_it_is_synthetic(made: Path) -> None:
    checkpoint = Checkpoint.open(made)
    assert checkpoint.config.synthetic
    assert checkpoint.config.fp8
    assert checkpoint.config.num_hidden_layers == 2
    assert set(checkpoint.ignored()) == {"mtp"}
    assert json.loads((made / "config.json").read_text())["huorn_synthetic"]["seed"] == 3


def test_shards_are_what_the_safetensors_library_writes(made: Path, tmp_path: Path) -> None:
    """Order, padding and header: the same bytes when the library saves the tensors it loaded."""
    shards = sorted(made.glob("*.safetensors"))
    assert [shard.name for shard in shards] == [
        "layers-0.safetensors", "layers-1.safetensors", "mtp.safetensors", "outside.safetensors"
    ]  # fmt: skip
    for shard in shards:
        with safe_open(shard, "pt") as file:
            assert file.metadata() == {"format": "pt"}
        save_file(load_file(shard), tmp_path / shard.name, {"format": "pt"})
        assert (tmp_path / shard.name).read_bytes() == shard.read_bytes()


def test_index_names_every_tensor_and_their_size(made: Path) -> None:
    index = json.loads((made / "model.safetensors.index.json").read_text())
    found = {
        name: (shard.name, t) for shard in made.glob("*.safetensors") for name, t in load_file(shard).items()
    }
    assert index["weight_map"] == {name: shard for name, (shard, _) in found.items()}
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for _, tensor in found.values())


def test_same_request_same_bytes_and_layers_do_not_depend_on_their_number(made: Path, tmp_path: Path) -> None:
    assert contents(make(tmp_path / "again")) == contents(made)
    more = make(tmp_path / "more", layers=3)
    assert (more / "layers-1.safetensors").read_bytes() == (made / "layers-1.safetensors").read_bytes()
    other = make(tmp_path / "other", seed=4)
    assert (other / "layers-1.safetensors").read_bytes() != (made / "layers-1.safetensors").read_bytes()


def test_all_experts_differ(made: Path) -> None:
    checkpoint = Checkpoint.open(made)
    config = checkpoint.config
    sums = [
        hashlib.sha256(matrix.data.view(torch.uint8).numpy()).hexdigest()
        for layer in range(config.num_hidden_layers)
        for expert in range(config.num_experts)
        for matrix in vars(checkpoint.expert(layer, expert)).values()
    ]
    assert len(set(sums)) == len(sums) == 2 * 16 * 3


def test_verify_accepts_it_and_its_manifest(tmp_path: Path) -> None:
    out = make(tmp_path / "model", manifest=True)
    report = verify(out, None, quiet)
    assert report.ok, report.problems
    assert report.checksums_matched == 4 + 4  # shards; config, generation config, tokenizer and its config


def test_without_direct_io_the_bytes_are_the_same(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "O_DIRECT", raising=False)
    assert contents(make(tmp_path / "model")) == contents(made)


def test_chunks_smaller_than_tensors(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tensor is cut: 4 KiB chunks against one chunk a file, checksums in order."""
    monkeypatch.setattr(disk_writer, "CHUNK_BYTES", 4096)
    out = make(tmp_path / "model", manifest=True)
    assert {name: data for name, data in contents(out).items() if name != "huorn-manifest.json"} == contents(
        made
    )
    assert verify(out, None, quiet).ok


@pytest.mark.parametrize("shards_done", [0, 1, 2])
def test_interrupted_run_is_no_checkpoint_and_continues(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shards_done: int
) -> None:
    out = tmp_path / "model"
    real, calls = disk_writer.DiskWriter.write, []

    def write(self: disk_writer.DiskWriter, path: Path, *rest: object) -> str | None:
        calls.append(path.name)
        if len(calls) == shards_done + 1:
            path.write_bytes(b"half a shard")
            raise KeyboardInterrupt
        return real(self, path, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(disk_writer.DiskWriter, "write", write)
    with pytest.raises(KeyboardInterrupt):
        make(out)
    with pytest.raises(CheckpointError):
        Checkpoint.open(out)
    calls.clear()
    seen: list[tuple[int, int]] = []
    monkeypatch.setattr(disk_writer.DiskWriter, "write", real)
    report = synthesize(PRESET, out, 2, 3, lambda done, total: seen.append((done, total)))
    assert contents(out) == contents(made)
    assert report.written_bytes < report.total_bytes or shards_done == 0
    assert seen[0][0] == report.total_bytes - report.written_bytes
    assert seen[-1] == (report.total_bytes, report.total_bytes)


def test_another_request_does_not_continue_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", broken)
        with pytest.raises(UsageError, match=r"No space left on device.*continues later"):
            make(tmp_path / "model")
    with pytest.raises(UsageError, match="unfinished run with preset tiny-fp8, layers 2, seed 3"):
        make(tmp_path / "model", seed=4)
    make(tmp_path / "model")


def test_disk_is_checked_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(100, 100, 30_000_000_000))
    with pytest.raises(UsageError, match=r"needs 36\.\d GB of disk, but 30\.0 GB are free"):
        synthesize("qwen3.5-35b-a3b-fp8", tmp_path / "new" / "model", None, 0, quiet)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_too_small_is_found_without_a_plan_of_every_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """3.8 TB in 6.3 million tensors."""
    planned: list[int] = []
    plan = MODULE.shards

    def counted(config: ModelConfig) -> dict[str, list[SynthTensor]]:
        planned.append(config.num_hidden_layers)
        return plan(config)

    monkeypatch.setattr(MODULE, "shards", counted)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(100, 100, 3_000_000_000_000))
    with pytest.raises(UsageError, match=r"needs 3\d\d\d\.\d GB of disk, but 3000\.0 GB are free"):
        synthesize("qwen3.5-35b-a3b-fp8", tmp_path / "model", 4096, 0, quiet)
    assert max(planned) == 8


@pytest.mark.parametrize("layers", [1, 3, 4, 5, 7, 8, 11])
def test_the_bound_on_bytes_is_one(layers: int) -> None:
    preset = find_preset(PRESET)
    exact = sum(t.nbytes for group in MODULE.shards(preset.with_layers(layers)).values() for t in group)
    least = MODULE._least_bytes(preset, layers)
    assert least == exact if layers % 4 == 0 else least < exact


def test_refusals(made: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    for call, words in {
        (PRESET, made, None, 0): "is not empty",
        (PRESET, tmp_path / "full", None, 0): "is not empty",
        (PRESET, tmp_path / "file", None, 0): "is a file",
        ("qwen", tmp_path / "a", None, 0): "presets are qwen3.5-35b-a3b-fp8, ",
        (PRESET, tmp_path / "a", 0, 0): "--layers 0 is out of range",
        (PRESET, tmp_path / "a", None, -1): "--seed -1 is out of range; give 0 to 18446744073709551615",
        (PRESET, tmp_path / "a", None, 2**64): "--seed 18446744073709551616 is out of range",
    }.items():
        with pytest.raises(UsageError, match=words):
            synthesize(*call, quiet)
    assert (tmp_path / "full" / "notes.txt").read_text() == "mine"
    assert not (tmp_path / "a").exists()
