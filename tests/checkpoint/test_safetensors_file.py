"""One safetensors file, against the safetensors package."""

from __future__ import annotations

import gc
import json
import os
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from huorn.checkpoint.safetensors_file import SafetensorsFile
from huorn.errors import CheckpointError

DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn)


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    shapes=st.lists(st.lists(st.integers(0, 5), max_size=3), min_size=1, max_size=6),
    dtypes=st.lists(st.sampled_from(DTYPES), min_size=6, max_size=6),
)
def test_reads_and_views_what_safetensors_wrote(
    tmp_path_factory: pytest.TempPathFactory, shapes: list[list[int]], dtypes: list[torch.dtype]
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.safetensors"
    generator = torch.Generator().manual_seed(0)
    tensors = {
        f"t{n}": torch.randn(shape, generator=generator).to(dtype)
        for n, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=False))
    }
    save_file(tensors, path)
    file = SafetensorsFile(path)
    theirs = load_file(path)
    assert file.infos.keys() == theirs.keys()
    for name, expected in theirs.items():
        for loaded in (file.read(name), file.view(name)):
            assert loaded.dtype == expected.dtype
            assert loaded.shape == expected.shape
            assert bits(loaded) == bits(expected)
        info = file.infos[name]
        assert path.read_bytes()[info.start : info.start + info.nbytes] == bits(expected)


def write_raw(path: Path, header: object, data: bytes) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def test_an_unaligned_tensor_is_viewed_right(tmp_path: Path) -> None:
    header = {
        "odd": {"dtype": "F8_E4M3", "shape": [3], "data_offsets": [0, 3]},
        "next": {"dtype": "F32", "shape": [2], "data_offsets": [3, 11]},
    }
    values = torch.tensor([1.5, -2.25])
    file = SafetensorsFile(write_raw(tmp_path / "x.safetensors", header, b"\0\1\2" + bits(values)))
    assert torch.equal(file.view("next"), values)
    assert torch.equal(file.read("next"), values)


def open_descriptors(path: Path) -> int:
    targets = []
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            targets.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        except OSError:  # the descriptor of the listing itself
            continue
    return targets.count(str(path.resolve()))


def mappings(path: Path) -> list[str]:
    """VmFlags of every mapping of `path` in this process."""
    flags: list[str] = []
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0] and ":" not in line.split()[0]:
            inside = line.endswith(str(path.resolve()))
        elif inside and line.startswith("VmFlags:"):
            flags.append(line)
    return flags


linux = pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="reads /proc of Linux")


@linux
def test_one_descriptor_per_file_and_none_left(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.ones(3000), "b": torch.ones(5)}, path)
    file = SafetensorsFile(path)
    view = file.view("a")
    file.read("b")
    assert open_descriptors(path) == 1
    del file
    gc.collect()
    assert open_descriptors(path) == 0
    assert view.sum() == 3000, "a view outlives its file"
    assert len(mappings(path)) == 1
    del view
    gc.collect()
    assert mappings(path) == []


@linux
def test_views_are_mapped_without_read_ahead(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.ones(3000)}, path)
    file = SafetensorsFile(path)
    assert mappings(path) == []
    file.view("a")
    assert " rr " in f"{mappings(path)[0]} ", "rr is the kernel's flag of MADV_RANDOM"
    assert " nr " in f"{mappings(path)[0]} ", "nr is its flag of MAP_NORESERVE"


@linux
def test_a_refused_file_leaves_no_descriptor(tmp_path: Path) -> None:
    path = write_raw(tmp_path / "x.safetensors", b"{", b"")
    with pytest.raises(CheckpointError):
        SafetensorsFile(path)
    gc.collect()
    assert open_descriptors(path) == 0


def test_a_file_cut_after_opening_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.ones(3000), "b": torch.ones(3000)}, path)
    file = SafetensorsFile(path)
    os.truncate(path, file.infos["b"].start + 100)
    assert file.read("a").sum() == 3000
    with pytest.raises(CheckpointError, match=rf"ends at offset {file.infos['b'].start + 100} inside b"):
        file.read("b")
    with pytest.raises(CheckpointError, match="was truncated after it was opened; b"):
        file.view("b")


def entry(begin: int = 0, end: int = 8, **changes: object) -> dict[str, object]:
    return {"dtype": "F32", "shape": [2], "data_offsets": [begin, end]} | changes


DAMAGED: list[tuple[object, bytes, str]] = [
    (b"", b"", "not valid JSON"),
    (b"{", b"", "not valid JSON"),
    (b"[]", b"", "not a JSON object"),
    (b"\xff", b"", "not valid JSON"),
    (b"[" * 90_000, b"", "not valid JSON"),
    (
        b'{"a": {"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
        bytes(8),
        "'dtype' appears twice",
    ),
    ({"a": entry()}, bytes(7), "a ends at offset"),
    ({"a": entry()}, bytes(9), "1 bytes after a belong to no tensor"),
    ({"a": entry(), "b": entry(4, 12)}, bytes(12), "b overlaps a"),
    ({"a": entry(), "b": entry()}, bytes(8), "overlaps"),
    ({"a": entry(), "b": entry(10, 18)}, bytes(18), "2 bytes between a and b"),
    ({"a": entry(4, 12)}, bytes(12), "4 bytes between the header and a"),
    ({"a": entry(8, 0)}, bytes(8), "has -8 bytes"),
    ({"a": entry(-8, 0)}, bytes(8), "no natural number"),
    ({"a": entry(0, 8.0)}, bytes(8), "no natural number"),
    ({"a": entry(False, 8)}, bytes(8), "no natural number"),
    ({"a": entry(shape=[-2, -1])}, bytes(8), "no natural number"),
    ({"a": entry(shape="2")}, bytes(8), "no natural number"),
    ({"a": entry(shape=None)}, bytes(8), "lacks a known dtype, a shape or two offsets"),
    ({"a": entry(shape=[3])}, bytes(8), r"a is F32 \[3\] but has 8 bytes"),
    ({"a": entry(shape=[2**70, 2**70])}, bytes(8), "but has 8 bytes"),
    ({"a": entry(dtype="F33")}, bytes(8), "lacks a known dtype"),
    ({"a": entry(dtype=["F32"])}, bytes(8), "lacks a known dtype"),
    ({"a": entry(data_offsets=[0])}, bytes(8), "two offsets"),
    ({"a": entry(data_offsets=[0, 4, 8])}, bytes(8), "two offsets"),
    ({"a": 5}, bytes(8), "lacks a known dtype"),
    ({"a": entry(0, 2**63)}, bytes(8), "but has 9223372036854775808 bytes"),
    ({"a\nb\ud800\x1b[31m": entry()}, bytes(7), r"a\\nb\\ud800\\x1b\[31m ends at"),
]


@pytest.mark.parametrize(("header", "data", "message"), DAMAGED)
def test_a_damaged_header_is_one_clear_line(
    tmp_path: Path, header: object, data: bytes, message: str
) -> None:
    path = write_raw(tmp_path / "x.safetensors", header, data)
    with pytest.raises(CheckpointError, match=message) as caught:
        SafetensorsFile(path)
    assert "x.safetensors" in str(caught.value)
    assert str(caught.value).isprintable()


def test_a_large_header_with_a_name_twice_is_refused_at_once(tmp_path: Path) -> None:
    names = [*(f"layers.{n}" for n in range(64_000)), "layers.63999"]
    header = ("{" + ",".join(f'"{name}":{json.dumps(entry())}' for name in names) + "}").encode()
    path = write_raw(tmp_path / "x.safetensors", header, b"")
    begin = time.process_time()
    with pytest.raises(CheckpointError, match=r"'layers\.63999' appears twice"):
        SafetensorsFile(path)
    assert time.process_time() - begin < 10  # comparing each name with each took 40 s


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "fewer than a safetensors header"),
        (b"1234567", "fewer than a safetensors header"),
        ((10**6).to_bytes(8, "little") + b"{}", "claims 1000000 bytes but the file has 10"),
        ((2**63).to_bytes(8, "little") + b"{}", "more than the format allows"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 1\n", "Git LFS pointer"),
        (b"GGUF\3\0\0\0" + bytes(40), "GGUF file"),
    ],
)
def test_a_file_of_another_kind_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        SafetensorsFile(path)
    with pytest.raises(CheckpointError, match="can not be opened: No such file"):
        SafetensorsFile(tmp_path / "nothing.safetensors")


def test_a_known_dtype_that_huorn_does_not_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.ones(3, dtype=torch.float64)}, path)
    for read in (SafetensorsFile(path).read, SafetensorsFile(path).view):
        with pytest.raises(CheckpointError, match="a is F64; huorn reads F32, BF16, F8_E4M3"):
            read("a")
