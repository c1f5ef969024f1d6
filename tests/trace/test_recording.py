"""The files of a trace: what was written is read, what is damaged is named, what was interrupted goes on to the same bytes."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from huorn.errors import TraceError, UsageError
from huorn.trace.chunk_writer import ChunkWriter
from huorn.trace.folder import open_folder
from huorn.trace.layout import ROW, layer_record
from huorn.trace.recording import Traces

from .recordings import MODEL, files_of, manifest_of, write_numbers, write_trace

ROWS = [3, 0, 2, 4, 1, 6, 0]  # chunks of 5 rows and more: prompts 0 to 2, 3 and 4, 5; 6 has no row


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_trace(tmp_path / "t", ROWS)
    return tmp_path / "t"


def test_a_row_of_the_35b_shape_is_as_large_as_the_docs_say() -> None:
    record = layer_record(("hidden", "logits", "ids", "weights"), 2048, 256, 8)
    assert record.itemsize == 2 * 2048 + 2 * 256 + 2 * 8 + 4 * 8 == 4656
    assert ROW.itemsize == 20
    assert layer_record(("ids", "weights"), 0, 128, 6).names == ("ids", "weights")


def test_what_was_written_is_read(folder: Path) -> None:
    traces = Traces.open(folder)
    assert [chunk.count for chunk in traces.chunks] == [5, 5, 6]
    assert sorted(path.name for path in folder.iterdir()) == [
        "chunk-00000", "chunk-00001", "chunk-00002", "manifest.json",
    ]  # fmt: skip
    seen = list[int]()
    for split in ("train", "validation", "test"):
        for prompt in traces.split(split):
            assert traces.manifest.prompts[prompt.prompt].split == split
            own = slice(prompt.first, prompt.first + prompt.count)
            rows = prompt.chunk.rows[own]
            generator = np.random.default_rng(prompt.prompt)
            assert prompt.count == ROWS[prompt.prompt]
            assert (rows["prompt"] == prompt.prompt).all()
            assert rows["step"].tolist() == list(range(prompt.count))
            assert rows["position"].tolist() == list(range(7, 7 + prompt.count))
            wanted = generator.integers(0, 100, (2, prompt.count))
            assert (rows["id"] == wanted[0]).all()
            assert (rows["next_id"] == wanted[1]).all()
            for layer in range(MODEL.layers):
                records = prompt.chunk.layer(layer)[own]
                hidden = generator.standard_normal((prompt.count, 4)).astype(np.float32)
                logits = generator.standard_normal((prompt.count, 6)).astype(np.float32)
                assert (records["hidden"] == hidden.astype(np.float16)).all()
                assert (records["logits"] == logits.astype(np.float16)).all()
                assert (records["ids"] == generator.random((prompt.count, 6)).argsort(axis=1)[:, :2]).all()
                assert (records["weights"] == generator.random((prompt.count, 2)).astype(np.float32)).all()
            seen.append(prompt.prompt)
    assert sorted(seen) == [0, 2, 3, 4, 5]
    traces.verify()


def test_the_manifest_has_the_checksums(folder: Path) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["schema"] == "huorn trace v1"
    for chunk in manifest["chunks"]:
        files = {path.name: path.read_bytes() for path in (folder / chunk["name"]).iterdir()}
        assert (
            files.keys()
            == chunk["files"].keys()
            == {"rows.bin", "layer-00.bin", "layer-01.bin", "layer-02.bin"}
        )
        for name, data in files.items():
            assert chunk["files"][name] == {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    assert [prompt["chunk"] for prompt in manifest["prompts"]] == [0, 0, 0, 1, 1, 2, 2]
    assert [prompt["first_row"] for prompt in manifest["prompts"]] == [0, 3, 3, 0, 4, 0, 6]


@settings(deadline=None, max_examples=40)
@given(
    rows=st.lists(st.integers(0, 7), min_size=1, max_size=8).filter(any),
    stops=st.lists(st.integers(0, 7), max_size=3),
    chunk_rows=st.integers(1, 9),
)
def test_interrupted_anywhere_it_ends_with_the_same_files(
    tmp_path_factory: pytest.TempPathFactory, rows: list[int], stops: list[int], chunk_rows: int
) -> None:
    base = tmp_path_factory.mktemp("resume")
    write_trace(base / "once", rows, chunk_rows=chunk_rows)
    for stop in stops:
        if stop < len(rows):
            try:
                write_trace(base / "again", rows, stop, chunk_rows=chunk_rows)
            except KeyboardInterrupt:
                left = files_of(base / "again")
                assert not [name for name in left if ".partial" in name]
                Traces.open(base / "again").verify()
    write_trace(base / "again", rows, chunk_rows=chunk_rows)
    assert files_of(base / "again") == files_of(base / "once")


def test_what_a_kill_leaves_is_removed(folder: Path, tmp_path: Path) -> None:
    """A chunk in the middle, and one that was renamed before the manifest was written."""
    with pytest.raises(KeyboardInterrupt):
        write_trace(tmp_path / "k", ROWS, stop_at=5)
    for name in (".chunk-00002.partial", "chunk-00002"):
        (tmp_path / "k" / name).mkdir()
        (tmp_path / "k" / name / "rows.bin").write_bytes(b"half")
    (tmp_path / "k" / ".huorn-0123456789abcdef.part").write_bytes(b"half")
    assert len(Traces.open(tmp_path / "k").chunks) == 2
    write_trace(tmp_path / "k", ROWS)
    assert files_of(tmp_path / "k") == files_of(folder)


def test_a_finished_trace_is_left_alone(folder: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    write_trace(folder, ROWS)
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


def test_no_prompt_with_a_row(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no prompt gives a row"):
        write_trace(tmp_path / "t", [0, 0, 0])


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model": MODEL.model_copy(update={"fingerprint": "c" * 64})}, "another model"),
        ({"mode": "teacher"}, r"another mode \(decode there, teacher here\)"),
        ({"tokens": 8}, r"another --tokens \(9 there, 8 here\)"),
        ({"chunk_rows": 6}, r"another --chunk-rows \(5 there, 6 here\)"),
        ({"precision": "f32"}, r"another --precision \(bf16 there, f32 here\)"),
        ({"isa": "amx"}, "another instruction set"),
        (
            {"source": manifest_of(1).source.model_copy(update={"sha256": "c" * 64})},
            "another file of prompts",
        ),
        ({"prompts": manifest_of(6).prompts}, "another tokenizer or split"),
    ],
)
def test_another_recording_is_refused_by_name(folder: Path, changes: dict[str, object], says: str) -> None:
    before = files_of(folder)
    with pytest.raises(TraceError, match=f"holds a recording of {says}"):
        write_trace(folder, ROWS, **changes)
    assert files_of(folder) == before


def test_folders_that_are_not_ours(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="is not empty and holds no trace"):
        write_trace(tmp_path / "other", ROWS)
    assert files_of(tmp_path / "other") == {"notes.txt": b"mine"}
    with pytest.raises(UsageError, match="none/t can not be made: No such file"):
        write_trace(tmp_path / "none" / "t", ROWS)
    with pytest.raises(UsageError, match="can not be made"):
        write_trace(folder / "manifest.json", ROWS)
    with (
        open_folder(folder, manifest_of(len(ROWS))),
        pytest.raises(UsageError, match="is being written by another huorn"),
    ):
        write_trace(folder, ROWS)


def test_a_folder_that_was_made_for_nothing_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("Usage", (), {"free": 1000})()
    monkeypatch.setattr("huorn.trace.folder.shutil.disk_usage", lambda path: usage)
    with open_folder(tmp_path / "t", manifest_of(3)) as opened:
        opened.check_room(1000 // opened.manifest.row_bytes)
        with pytest.raises(UsageError, match=r"up to 9 rows need .* has 1\.0 KB free: give fewer"):
            opened.check_room(9)
    assert not (tmp_path / "t").exists()


def edited(edit: Callable[[dict[str, object]], object]) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        value = json.loads((folder / "manifest.json").read_text())
        edit(value)
        (folder / "manifest.json").write_text(json.dumps(value))

    return change


def cut(name: str, size: int) -> Callable[[Path], None]:
    return lambda folder: os.truncate(folder / name, size)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda folder: (folder / "manifest.json").unlink(), "is not a trace: it has no manifest.json"),
        (cut("manifest.json", 100), "manifest.json is not valid JSON"),
        (
            edited(lambda value: value.update(schema="huorn trace v2")),
            "has the schema 'huorn trace v2', but this",
        ),
        (edited(lambda value: value.update(chunk_rows=0)), "manifest.json is damaged: chunk_rows"),
        (
            edited(lambda value: value.update(chunks=[])),
            "damaged: prompt 0 is in chunk 0, which is not there",
        ),
        (edited(lambda value: value["chunks"][0].update(name="../x")), "damaged: chunk 0 is called '../x'"),
        (
            edited(lambda value: value["prompts"][0].update(rows=9)),
            "damaged: the rows of prompt 0 leave its chunk",
        ),
        (edited(lambda value: value["chunks"][0]["files"].pop("rows.bin")), "damaged: .*must have rows.bin"),
        (
            edited(lambda value: value["model"].update(hidden=5)),
            "layer-00.bin should have .* but the manifest says",
        ),
        (cut("chunk-00001/layer-02.bin", 100), "layer-02.bin has 100 bytes instead of 160: it was cut short"),
        (cut("chunk-00001/rows.bin", 99), "rows.bin has 99 bytes instead of 100"),
        (lambda folder: (folder / "chunk-00002" / "layer-01.bin").unlink(), "layer-01.bin is missing"),
    ],
)
def test_damage_is_named(folder: Path, damage: Callable[[Path], None], says: str) -> None:
    damage(folder)
    with pytest.raises(TraceError, match=says):
        Traces.open(folder)


def test_what_is_no_folder(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="none is not a trace: it is no folder"):
        Traces.open(tmp_path / "none")


def flip(path: Path, offset: int, data: bytes) -> None:
    raw = bytearray(path.read_bytes())
    raw[offset : offset + len(data)] = data
    path.write_bytes(raw)


def resign(folder: Path, chunk: int, name: str) -> None:
    """The manifest knows the damaged file: whoever wrote it wrote wrong numbers."""
    data = (folder / f"chunk-{chunk:05d}" / name).read_bytes()
    edited(
        lambda value: value["chunks"][chunk]["files"][name].update(sha256=hashlib.sha256(data).hexdigest())
    )(folder)


def test_verify_names_the_first_bad_file(folder: Path) -> None:
    path = folder / "chunk-00001" / "layer-01.bin"
    flip(path, 3, bytes([path.read_bytes()[3] ^ 1]))
    with pytest.raises(TraceError, match=r"chunk-00001/layer-01.bin is damaged: its SHA-256"):
        Traces.open(folder).verify()


@pytest.mark.parametrize(
    ("offset", "data", "says"),
    [
        (0, b"\x00\x7e", "NaN or infinity in hidden of row 2"),
        (8, b"\x00\x7c", "NaN or infinity in logits of row 2"),
        (20, b"\x06\x00", "an expert that does not exist in ids of row 2"),
        (24, b"\x00\x00\x80\xff", "NaN or infinity in weights of row 2"),
    ],
)
def test_verify_names_the_row(folder: Path, offset: int, data: bytes, says: str) -> None:
    path = folder / "chunk-00002" / "layer-01.bin"
    flip(path, 2 * 32 + offset, data)
    resign(folder, 2, "layer-01.bin")
    with pytest.raises(TraceError, match=f"chunk-00002/layer-01.bin holds {says}$"):
        Traces.open(folder).verify()


def test_verify_compares_rows_with_the_manifest(folder: Path) -> None:
    flip(folder / "chunk-00001" / "rows.bin", 2 * 20 + 4, b"\x05")
    resign(folder, 1, "rows.bin")
    with pytest.raises(TraceError, match=r"chunk-00001/rows.bin has another prompt or step in row 2"):
        Traces.open(folder).verify()


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("hidden", 65600.0, "layer 1 has a hidden state of 65600, and a trace holds up to 65504"),
        ("logits", -70000.0, "layer 1 has a router logit of -70000"),
        ("hidden", np.nan, "layer 1 has a hidden state of nan"),
        ("weights", np.inf, "layer 1 has a weight of inf"),
    ],
)
def test_what_f16_can_not_hold_is_no_infinity(tmp_path: Path, field: str, value: float, says: str) -> None:
    writer = ChunkWriter(tmp_path, 0, manifest_of(1))
    fields = {
        "hidden": np.ones((2, 4)),
        "logits": np.ones((2, 6)),
        "ids": np.ones((2, 2)),
        "weights": np.ones((2, 2)),
    }
    fields[field][1, 1] = value
    with pytest.raises(OverflowError, match=says):
        writer.add_layer(1, **fields)
    writer.close()


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    writer = ChunkWriter(tmp_path, 0, manifest_of(1))
    writer._files["layer-01.bin"]._file = open("/dev/full", "wb")  # noqa: SIM115
    write_numbers(0, 3, writer)
    with pytest.raises(TraceError, match=r"layer-01.bin can not be written: No space left on device"):
        writer.finish()
