"""`verify` reads everything, lists every problem, and compares checksums."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from huorn.checkpoint.safetensors_file import SafetensorsFile
from huorn.checkpoint.verify import VerifyReport, verify
from huorn.errors import CheckpointError

from .folders import (
    FP8_SCHEME,
    INDEX,
    fused_state,
    model_of,
    nested_config,
    prefixed,
    quantized,
    split_experts,
    text_config,
    write_folder,
)

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def run(directory: Path, manifest: Path | None = None) -> VerifyReport:
    return verify(directory, manifest, lambda done, total: None)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    stored = quantized(split_experts(fused_state(model_of(text_config(), torch.bfloat16))), torch.bfloat16)
    tensors = prefixed(stored, "model.language_model.") | {"mtp.fc.weight": torch.ones(2, 2)}
    config = nested_config(text_config(), quantization_config=FP8_SCHEME)
    return write_folder(tmp_path / "model", config, tensors, shards=2)


def sums_of(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.iterdir())}


def test_a_whole_checkpoint(folder: Path) -> None:
    steps: list[tuple[int, int]] = []
    report = verify(folder, None, lambda done, total: steps.append((done, total)))
    stored = load_file(folder / FIRST) | load_file(folder / SECOND)
    size = sum(tensor.nbytes for tensor in stored.values())
    assert report.ok
    assert report.problems == []
    assert report.tensors_by_kind == {"text": len(stored) - 1, "mtp": 1}
    assert sum(report.tensors_by_dtype.values()) == len(stored)
    assert set(report.tensors_by_dtype) == {"F8_E4M3", "BF16", "F32"}
    assert report.bytes_read == size
    assert steps[-1] == (size, size)
    assert steps == sorted(steps)
    assert report.manifest is None
    assert report.checksums_matched == 0


@pytest.mark.parametrize("form", ["huorn-manifest.json", "SHA256SUMS", "elsewhere.txt"])
def test_checksums(folder: Path, tmp_path: Path, form: str) -> None:
    sums = sums_of(folder)
    if form.endswith(".json"):
        files = {name: {"sha256": sha, "size": (folder / name).stat().st_size} for name, sha in sums.items()}
        content = json.dumps({"files": files})
    else:
        content = "".join(f"{sha}  {name}\n" for name, sha in sums.items())
    manifest = (tmp_path if form == "elsewhere.txt" else folder) / form
    manifest.write_text(content)
    given = manifest if form == "elsewhere.txt" else None
    report = run(folder, given)
    assert (report.problems, report.manifest, report.checksums_matched) == ([], manifest, len(sums))

    shard = bytearray((folder / SECOND).read_bytes())
    shard[-3] ^= 1  # a mantissa bit: nothing but the checksum can tell
    (folder / SECOND).write_bytes(shard)
    (folder / INDEX).write_text((folder / INDEX).read_text() + " ")
    report = run(folder, given)
    assert len(report.problems) == 2
    assert SECOND in report.problems[0]
    assert "has SHA-256" in report.problems[0]
    assert INDEX in report.problems[1]
    assert report.checksums_matched == len(sums) - 2


def test_checksums_are_those_of_sha256sum(folder: Path) -> None:
    # the digest is fed with header and tensors one by one; it must be the file's
    manifest = folder / "SHA256SUMS"
    manifest.write_text(f"{hashlib.sha256((folder / FIRST).read_bytes()).hexdigest().upper()} *./{FIRST}\n")
    assert run(folder).checksums_matched == 1


def test_a_file_that_the_manifest_lists_is_missing(folder: Path) -> None:
    (folder / "SHA256SUMS").write_text(f"{'0' * 64}  tokenizer.json\n")
    assert run(folder).problems == [f"{folder / 'tokenizer.json'} is missing; the manifest lists it"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("m.json", "{", "not valid JSON"),
        ("m.json", "{}", "no object named files"),
        ("m.json", '{"files": {"a": {"sha256": "00"}}}', "a has no sha256 of 64 hex digits"),
        ("m.json", '{"files": {"a": 5}}', "a has no sha256"),
        ("m.json", '{"files": {"../a": {"sha256": "' + "0" * 64 + '"}}}', "plain file names"),
        ("m.txt", "", "lists no file"),
        ("m.txt", "hello\n", "line 1: expected 64 hex digits"),
        ("m.txt", "0" * 64 + "  /etc/passwd\n", "plain file names"),
        ("m.txt", "\udcff", "can not be read"),
    ],
)
def test_a_manifest_that_can_not_be_used(
    folder: Path, tmp_path: Path, name: str, content: str, message: str
) -> None:
    (tmp_path / name).write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(CheckpointError, match=message):
        run(folder, tmp_path / name)


def test_a_manifest_that_is_not_there(folder: Path, tmp_path: Path) -> None:
    for name in ("none.json", "none.txt"):
        with pytest.raises(CheckpointError, match=name) as caught:
            run(folder, tmp_path / name)
        assert str(caught.value).count(name) == 1


def test_every_problem_is_listed(folder: Path) -> None:
    tensors = load_file(folder / FIRST)
    norm, wrong_shape = [name for name in tensors if name.endswith("layernorm.weight")][:2]
    del tensors[norm]
    tensors[wrong_shape] = torch.ones(3, dtype=torch.float16)
    save_file(tensors, folder / FIRST)
    index = json.loads((folder / INDEX).read_text())
    del index["weight_map"][norm]
    (folder / INDEX).write_text(json.dumps(index))
    problems = run(folder).problems
    assert len(problems) == 3
    assert sum(wrong_shape in problem for problem in problems) == 2
    assert any(problem.endswith(f"{norm} [144] is missing") for problem in problems)


def test_a_damaged_shard_does_not_hide_the_others(folder: Path) -> None:
    (folder / FIRST).unlink()
    (folder / SECOND).write_bytes((folder / SECOND).read_bytes()[:-1])
    problems = run(folder).problems
    assert [FIRST in problems[0], SECOND in problems[1], len(problems)] == [True, True, 2]


def test_a_folder_of_another_kind_is_refused(tmp_path: Path) -> None:
    for place, message in ((tmp_path, "is empty"), (tmp_path / "none", "none does not exist")):
        with pytest.raises(CheckpointError, match=message):
            run(place)


def test_a_config_that_can_not_be_used_is_a_problem(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    report = run(folder)
    assert len(report.problems) == 1
    assert "config.json is not valid JSON" in report.problems[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_numbers_that_are_none_are_named(folder: Path, dtype: torch.dtype, value: float) -> None:
    tensors = load_file(folder / FIRST)
    name = next(name for name in tensors if name.endswith("layernorm.weight"))
    tensors[name] = tensors[name].to(dtype)
    tensors[name][7] = value
    save_file(tensors, folder / FIRST)
    assert run(folder).problems == [f"{folder / FIRST}: {name} holds NaN or infinity; the file is damaged"]


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_nan_codes_are_named(folder: Path, code: int) -> None:
    tensors = load_file(folder / FIRST)
    name = next(name for name, tensor in tensors.items() if tensor.dtype == torch.float8_e4m3fn)
    tensors[name].view(torch.uint8)[-1, -1] = code
    save_file(tensors, folder / FIRST)
    assert run(folder).problems == [f"{folder / FIRST}: {name} holds NaN or infinity; the file is damaged"]


def test_negative_scales_are_named(folder: Path) -> None:
    tensors = load_file(folder / FIRST)
    name = next(name for name in tensors if name.endswith("_scale_inv"))
    tensors[name][-1, -1] = -2.0
    save_file(tensors, folder / FIRST)
    assert run(folder).problems == [
        f"{folder / FIRST}: {name} has a negative block scale (-2); the file is damaged"
    ]


def test_a_tensor_that_can_not_be_read_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = next(iter(SafetensorsFile(folder / FIRST).infos))
    whole = SafetensorsFile.read_into

    def fails(self: SafetensorsFile, target: memoryview, start: int, what: str) -> None:
        if what == broken:
            raise CheckpointError(
                f"{self.path}: {what} can not be read at offset {start}: Input/output error"
            )
        whole(self, target, start, what)

    monkeypatch.setattr(SafetensorsFile, "read_into", fails)
    problems = run(folder).problems
    assert len(problems) == 1
    assert f"{FIRST}: {broken} can not be read" in problems[0]
