"""Figures of a trace against plain loops over its rows."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from huorn.assets import EMBEDDED_MODEL
from huorn.checkpoint.fingerprint import model_fingerprint
from huorn.checkpoint.reader import Checkpoint
from huorn.errors import UsageError
from huorn.trace import next_gate
from huorn.trace.next_gate import next_gate_recall
from huorn.trace.recording import Traces
from huorn.trace.summary import summarize

from .recordings import MODEL, write_trace


def nothing(done: int, total: int) -> None:
    pass


def test_figures_of_layers(tmp_path: Path) -> None:
    write_trace(tmp_path / "t", [5, 1, 4, 0, 6])
    traces = Traces.open(tmp_path / "t")
    summary = summarize(traces, nothing)
    assert summary.rows == 16
    assert {name: size.rows for name, size in summary.splits.items()} == {
        "train": 5,
        "validation": 7,
        "test": 4,
    }
    assert {name: size.recorded for name, size in summary.splits.items()} == {
        "train": 2,
        "validation": 2,
        "test": 1,
    }
    assert summary.bytes == sum(path.stat().st_size for path in (tmp_path / "t").rglob("*.bin"))
    for layer, figures in enumerate(summary.layers):
        again = pairs = 0
        counts = [0] * MODEL.experts
        for split in ("train", "validation", "test"):
            for prompt in traces.split(split):
                ids = prompt.chunk.layer(layer)["ids"][prompt.first : prompt.first + prompt.count].tolist()
                for before, after in pairwise(ids):
                    again, pairs = again + len(set(before) & set(after)), pairs + len(after)
                for row in ids:
                    for expert in row:
                        counts[expert] += 1
        assert figures.overlap == pytest.approx(again / pairs, rel=1e-12)
        assert figures.hottest_quarter == pytest.approx(max(counts) / sum(counts), rel=1e-12)


def test_nothing_to_compare(tmp_path: Path) -> None:
    write_trace(tmp_path / "t", [1, 1, 1])
    assert {layer.overlap for layer in summarize(Traces.open(tmp_path / "t"), nothing).layers} == {None}
    with pytest.raises(KeyboardInterrupt):
        write_trace(tmp_path / "empty", [1, 1, 1], stop_at=0)
    with pytest.raises(UsageError, match="has no whole chunk yet"):
        summarize(Traces.open(tmp_path / "empty"), nothing)


class Routers:
    """Stands for a checkpoint: random routers [E, D], of which layer 2's asks for what layer 1 read."""

    directory = Path("m")

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.weights = [torch.randn(MODEL.experts, 4, generator=generator) for _ in range(MODEL.layers)]

    def tensor(self, name: str) -> torch.Tensor:
        return self.weights[int(name.split(".")[1])]


@pytest.mark.parametrize("most", [4096, 5])
def test_the_next_gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    monkeypatch.setattr(next_gate, "model_fingerprint", lambda checkpoint: MODEL.fingerprint)
    monkeypatch.setattr(next_gate, "MOST_ROWS", most)
    write_trace(tmp_path / "t", [5, 3, 4, 7])
    traces, routers = Traces.open(tmp_path / "t"), Routers()
    recalls = next_gate_recall(traces, routers, nothing)  # type: ignore[arg-type]
    assert recalls[0].at_k is None
    stride = -(-19 // most)
    assert next_gate.sampled_rows(traces) == len(range(0, 19, stride))
    for layer in (1, 2):
        hidden = np.concatenate([chunk.layer(layer - 1)["hidden"] for chunk in traces.chunks])[::stride]
        used = np.concatenate([chunk.layer(layer)["ids"] for chunk in traces.chunks])[::stride]
        hits = 0
        for state, ids in zip(hidden, used, strict=True):
            scores = [
                float(sum(a * b for a, b in zip(row, state.tolist(), strict=True)))
                for row in routers.weights[layer].tolist()
            ]
            best = sorted(range(MODEL.experts), key=lambda expert: -scores[expert])[: MODEL.top_k]
            hits += len(set(best) & set(ids.tolist()))
        assert recalls[layer].at_k == pytest.approx(hits / used.size)
        assert recalls[layer].at_8 == 1.0  # of six experts


def test_the_next_gate_needs_the_recorded_model(tmp_path: Path) -> None:
    write_trace(tmp_path / "t", [2, 2, 2])
    with pytest.raises(UsageError, match="was recorded of another model"):
        next_gate_recall(Traces.open(tmp_path / "t"), Checkpoint.open(EMBEDDED_MODEL), nothing)


def copy_with(folder: Path, change: object) -> Path:
    """seedling with changed tensors, in two shards."""
    folder.mkdir()
    for path in EMBEDDED_MODEL.iterdir():
        if path.suffix in (".json", ".jinja"):
            (folder / path.name).write_bytes(path.read_bytes())
    tensors = load_file(EMBEDDED_MODEL / "model.safetensors")
    change(tensors)  # type: ignore[operator]
    names = sorted(tensors)
    halves = {"model-00001-of-00002.safetensors": names[1::2], "model-00002-of-00002.safetensors": names[::2]}
    for file, part in halves.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    homes = {name: file for file, part in halves.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": homes}))
    return folder


def flip_a_bit(name: str) -> object:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        (found,) = (key for key in tensors if key.endswith(name))
        raw = tensors[found].view(torch.uint8)
        raw[-1, -2] ^= 1

    return change


def test_fingerprints(tmp_path: Path) -> None:
    own = model_fingerprint(Checkpoint.open(EMBEDDED_MODEL))
    assert len(own) == 64
    assert model_fingerprint(Checkpoint.open(copy_with(tmp_path / "shards", lambda tensors: None))) == own
    for number, name in enumerate(
        ("layers.0.mlp.gate.weight", "layers.7.mlp.gate.weight", "embed_tokens.weight")
    ):
        folder = copy_with(tmp_path / str(number), flip_a_bit(name))
        assert model_fingerprint(Checkpoint.open(folder)) != own, name
    text = (tmp_path / "shards" / "config.json").read_text()
    assert '"rms_norm_eps": 1e-06' in text
    (tmp_path / "shards" / "config.json").write_text(
        text.replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05')
    )
    assert model_fingerprint(Checkpoint.open(tmp_path / "shards")) != own
