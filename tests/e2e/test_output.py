"""What reaches a terminal, a pipe and a JSON file."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from huorn.commands.output import ModelText, check_json_path, write_json
from huorn.errors import UsageError

HOSTILE = "a\x1b]0;title\x07b\x9bc\x7f\td\ne\r"


class Stream(io.TextIOWrapper):
    def __init__(self, terminal: bool) -> None:
        super().__init__(io.BytesIO(), encoding="ascii")
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal


@pytest.mark.parametrize(("terminal", "want"), [(False, HOSTILE), (True, "a␛]0;title␇b\ufffdc␡\td\ne␍")])
def test_control_characters_do_not_reach_a_terminal(
    monkeypatch: pytest.MonkeyPatch, terminal: bool, want: str
) -> None:
    stream = Stream(terminal)
    monkeypatch.setattr(sys, "stdout", stream)
    ModelText().write(HOSTILE)
    assert isinstance(stream.buffer, io.BytesIO)
    assert stream.buffer.getvalue() == want.encode()


def test_an_unfinished_line_is_ended_once(capsys: pytest.CaptureFixture[str]) -> None:
    for pieces, want in ((["a"], "\n"), (["a\n"], ""), (["a\n", "b", ""], "\n"), ([], "")):
        out = ModelText()
        for piece in pieces:
            out.write(piece)
        out.close_line()
        out.close_line()
        assert capsys.readouterr().err == want


def test_checking_a_json_path_leaves_no_trace(tmp_path: Path) -> None:
    check_json_path(tmp_path / "new.json")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "old.json").write_text("kept")
    check_json_path(tmp_path / "old.json")
    assert (tmp_path / "old.json").read_text() == "kept"


def test_checking_leaves_a_link_without_a_target_alone(tmp_path: Path) -> None:
    link = tmp_path / "link.json"
    link.symlink_to("target.json")
    check_json_path(link)
    assert link.is_symlink()
    assert not link.exists()
    write_json(link, {})
    assert (tmp_path / "target.json").read_text() == "{}\n"
    assert link.is_symlink()


def test_json_holds_names_that_are_no_utf8(tmp_path: Path) -> None:
    write_json(tmp_path / "x.json", {"directory": "a\udcff"})
    assert json.loads((tmp_path / "x.json").read_text(encoding="utf-8")) == {"directory": "a\udcff"}


def test_json_is_readable_text(tmp_path: Path) -> None:
    write_json(tmp_path / "x.json", {"text": "東京"})
    assert (tmp_path / "x.json").read_text(encoding="utf-8") == '{\n  "text": "東京"\n}\n'
    with pytest.raises(UsageError, match="can not be written: Is a directory"):
        write_json(tmp_path, {})
