"""The warm start file: what was saved comes back to the bit, for the same files of the same checkpoint only."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from huorn.checkpoint.reader import Checkpoint
from huorn.errors import CheckpointError, UsageError
from huorn.experts.policy import make_policy
from huorn.experts.warm import CheckpointIdentity, checkpoint_identity, load_warm, save_warm

INDEX = "model.safetensors.index.json"
LAYERS, EXPERTS = 4, 8  # of the tiny model


@pytest.fixture
def folder(tiny_model: Path, tmp_path: Path) -> Path:
    """A checkpoint of one file, without an index."""
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


@pytest.fixture
def sharded(folder: Path) -> Path:
    """The same with an index."""
    infos = Checkpoint.open(folder).infos
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(infos, "a.safetensors")}))
    return folder


def identity_of(folder: Path) -> CheckpointIdentity:
    return checkpoint_identity(Checkpoint.open(folder))


def some_scores() -> NDArray[np.float64]:
    policy = make_policy("layer-lfu", LAYERS, EXPERTS, 10)
    generator = np.random.default_rng(0)
    for layer in (0, 1, 3):
        for _ in range(20):
            policy.use(layer, generator.permutation(EXPERTS)[None, :2].astype(np.int32))
    return policy.scores()


@pytest.mark.parametrize("layout", ["folder", "sharded"])
def test_scores_come_back(layout: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    folder = request.getfixturevalue(layout)
    path, scores = tmp_path / "warm.json", some_scores()
    save_warm(path, identity_of(folder), scores)
    loaded = load_warm(path, identity_of(folder))
    assert loaded.dtype == np.float64
    assert loaded.shape == (LAYERS, EXPERTS)
    assert (loaded == scores).all()
    assert scores[2].max() == 0 < scores[0].min()
    assert set(json.loads(path.read_text())) == {"format", "checkpoint", "scores"}
    assert [child.name for child in path.parent.iterdir() if child.suffix == ".part"] == []
    save_warm(path, identity_of(folder), scores / 3)
    assert (load_warm(path, identity_of(folder)) == scores / 3).all()


def touched(path: Path) -> None:
    before = path.stat()
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))


def rewritten(path: Path) -> None:
    """Another byte in the last weight, in place: the same size."""
    before = path.stat()
    raw = bytearray(path.read_bytes())
    raw[-2] ^= 1
    path.write_bytes(raw)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 5_000_000_000))


@pytest.mark.parametrize("change", [touched, rewritten])
@pytest.mark.parametrize("layout", ["folder", "sharded"])
def test_a_changed_shard_is_noticed(
    layout: str, change: Any, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    folder = request.getfixturevalue(layout)
    path = tmp_path / "warm.json"
    save_warm(path, identity_of(folder), some_scores())
    shard = next(folder.glob("*.safetensors"))
    change(shard)
    with pytest.raises(
        UsageError,
        match=rf"^{path} belongs to another state of this checkpoint: {shard.name} has changed since; "
        "delete it to start without, or give another file$",
    ):
        load_warm(path, identity_of(folder))


def reindexed(folder: Path) -> None:
    index = folder / INDEX
    index.write_text(json.dumps(json.loads(index.read_text()), indent=1))


def renamed(folder: Path) -> None:
    (folder / "a.safetensors").rename(folder / "b.safetensors")
    index = folder / INDEX
    index.write_text(index.read_text().replace("a.safetensors", "b.safetensors"))


def replaced(folder: Path) -> None:
    """Another download under the same names."""
    reindexed(folder)
    touched(folder / "a.safetensors")


@pytest.mark.parametrize("change", [reindexed, renamed, replaced])
def test_another_index_is_another_checkpoint(sharded: Path, change: Any, tmp_path: Path) -> None:
    path = tmp_path / "warm.json"
    save_warm(path, identity_of(sharded), some_scores())
    change(sharded)
    with pytest.raises(UsageError, match=rf"^{path} belongs to another checkpoint than the one opened; del"):
        load_warm(path, identity_of(sharded))


def test_the_header_of_a_lone_file_counts(folder: Path, tmp_path: Path) -> None:
    """Same size and time, other names in the header: here two tensors of one shape change places."""
    path, weights = tmp_path / "warm.json", folder / "model.safetensors"
    save_warm(path, identity_of(folder), some_scores())
    before, raw = weights.stat(), weights.read_bytes()
    first, second = b"layers.0.input_layernorm", b"layers.1.input_layernorm"
    assert raw.count(first) == raw.count(second) == 1
    weights.write_bytes(raw.replace(first, b"?").replace(second, first).replace(b"?", second, 1))
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert weights.stat().st_size == before.st_size
    with pytest.raises(UsageError, match="belongs to another checkpoint"):
        load_warm(path, identity_of(folder))


def test_a_shard_that_has_gone(folder: Path) -> None:
    checkpoint = Checkpoint.open(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model.safetensors can not be read any more: No such file"):
        checkpoint_identity(checkpoint)


def changed(path: Path, *keys: Any, value: Any) -> None:
    content = json.loads(path.read_text())
    inner = content
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = value
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("keys", "value", "says"),
    [
        (("format",), "huorn warm start v2", r"format: Input should be 'huorn warm start v1'"),
        (("scores", 1, 2), -0.5, r"scores.1.2: Input should be greater than or equal to 0"),
        (("scores", 1, 2), float("nan"), r"scores.1.2: Input should be a finite number"),
        (("scores", 1, 2), 1e999, r"scores.1.2: Input should be a finite number"),
        (("scores", 1, 2), "7", r"scores.1.2: Input should be a valid number"),
        (("scores", 3), [1.0] * 7, r"its scores are not 4 x 8 numbers"),
        (("scores",), [[1.0] * 8] * 3, r"its scores are not 4 x 8 numbers"),
        (("scores",), [[1.0] * 4] * 8, r"its scores are not 4 x 8 numbers"),
        (("scores",), None, r"scores: Input should be a valid"),
        (("checkpoint", "shards"), {}, r"checkpoint.shards: Input should be a valid"),
        (("strange",), 1, r"strange: Extra inputs are not permitted"),
    ],
)
def test_damaged_values(folder: Path, tmp_path: Path, keys: Any, value: Any, says: str) -> None:
    path, identity = tmp_path / "warm.json", identity_of(folder)
    save_warm(path, identity, some_scores())
    changed(path, *keys, value=value)
    with pytest.raises(UsageError, match=rf"^{path} is damaged.*{says}.*; delete it to start without"):
        load_warm(path, identity)


@settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_damage_is_one_sentence_or_harmless(tmp_path: Path, data: st.DataObject) -> None:
    identity = CheckpointIdentity(layers=2, experts=2, sha256="0" * 64, shards=())
    path = tmp_path / "warm.json"
    save_warm(path, identity, np.array([[0.25, 1e-300], [3.5, 0]]))
    raw = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(raw)))
        raw[start : start + data.draw(st.integers(0, 9))] = data.draw(st.binary(max_size=4))
    path.write_bytes(raw)
    try:
        scores = load_warm(path, identity)
    except UsageError:
        return
    assert scores.shape == (2, 2)
    assert np.isfinite(scores).all()
    assert (scores >= 0).all()


def test_files_that_are_none(folder: Path, tmp_path: Path) -> None:
    identity = identity_of(folder)
    with pytest.raises(UsageError, match=r"^the warm start file .*none can not be read: No such file"):
        load_warm(tmp_path / "none", identity)
    with pytest.raises(UsageError, match=r"^the warm start file .* can not be read: Is a directory"):
        load_warm(tmp_path, identity)
    (tmp_path / "deep").write_text("[" * 100_000)
    with pytest.raises(UsageError, match=r"deep is damaged or no warm start file"):
        load_warm(tmp_path / "deep", identity)
    with (tmp_path / "large").open("wb") as file:
        file.truncate(65 * 2**20)
    with pytest.raises(UsageError, match=r"large is larger than any warm start file"):
        load_warm(tmp_path / "large", identity)
    with pytest.raises(UsageError, match=r"^the warm start file .* can not be written: "):
        save_warm(tmp_path / "no" / "warm.json", identity, some_scores())
    with pytest.raises(UsageError, match=r"^the warm start file .* can not be written: "):
        save_warm(tmp_path / "a\0b", identity, some_scores())
