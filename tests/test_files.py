"""Files are written whole or not at all, through links, and with names and texts that are no UTF-8."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from huorn.errors import UsageError
from huorn.files import decode_utf8, write_atomically


def test_an_existing_file_survives_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.json"
    path.write_text("kept")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, "new")
    assert path.read_text() == "kept"
    assert list(tmp_path.iterdir()) == [path]


def test_mode_is_kept_and_a_new_file_gets_the_usual_one(tmp_path: Path) -> None:
    for name in ("old", "new", "usual"):
        if name != "new":
            (tmp_path / name).write_text("")
    (tmp_path / "old").chmod(0o640)
    write_atomically(tmp_path / "old", "text")
    write_atomically(tmp_path / "new", "text")
    assert (tmp_path / "old").stat().st_mode & 0o777 == 0o640
    assert (tmp_path / "new").stat().st_mode == (tmp_path / "usual").stat().st_mode
    assert (tmp_path / "old").read_text() == (tmp_path / "new").read_text() == "text"


def test_links_stay_links(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    target, link = tmp_path / "folder" / "target", tmp_path / "link"
    link.symlink_to("folder/target")
    for text in ("first", "second"):  # of a link without a target, then of one with
        write_atomically(link, text)
        assert link.is_symlink()
        assert not target.is_symlink()
        assert target.read_text() == text
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["folder", "link", "target"]


def test_what_is_no_regular_file_is_written_in_place(tmp_path: Path) -> None:
    write_atomically(Path("/dev/null"), "text")
    assert Path("/dev/null").is_char_device()
    with pytest.raises(IsADirectoryError):
        write_atomically(tmp_path, "text")
    with pytest.raises(ValueError, match="null"):
        write_atomically(tmp_path / "a\0b", "text")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_permissions_are_asked_for(tmp_path: Path) -> None:
    locked = tmp_path / "locked"
    locked.write_text("kept")
    locked.chmod(0o444)
    with pytest.raises(PermissionError):
        write_atomically(locked, "text")
    locked.chmod(0o644)
    tmp_path.chmod(0o555)  # no file can be made beside it
    write_atomically(locked, "text")
    with pytest.raises(PermissionError):
        write_atomically(tmp_path / "new", "text")
    tmp_path.chmod(0o755)
    assert locked.read_text() == "text"


def test_lone_surrogates_come_back_from_json(tmp_path: Path) -> None:
    path = tmp_path / "n\udcff.json"
    write_atomically(path, json.dumps("a\ud800b\udcff", ensure_ascii=False))
    assert path.read_bytes() == rb'"a\ud800b\udcff"'
    assert json.loads(path.read_text()) == "a\ud800b\udcff"


def test_bytes_that_are_no_utf8_are_named() -> None:
    assert decode_utf8("ü".encode(), "stdin") == "ü"
    with pytest.raises(UsageError, match=r"^stdin is not UTF-8: byte 2 is 0xff$"):
        decode_utf8(b"ab\xff", "stdin")
