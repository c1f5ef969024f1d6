"""Conversations in files: what is accepted, and what is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from huorn.engine.messages import Message, parse_messages, read_messages, write_messages
from huorn.errors import UsageError


def test_save_and_load(tmp_path: Path) -> None:
    messages = [Message("system", "s"), Message("user", "ü 🦌\n\"'\ud800"), Message("assistant", "")]
    write_messages(tmp_path / "chat.json", messages)
    assert read_messages(tmp_path / "chat.json") == messages


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"text": "b"}]
    assert parse_messages([{"role": "user", "content": parts}], "x") == [Message("user", "ab")]


def test_system_and_developer_messages_become_one_in_front() -> None:
    values = [
        {"role": "user", "content": "q"},
        {"role": "system", "content": "one"},
        {"role": "assistant", "content": "a"},
        {"role": "developer", "content": "two"},
    ]
    want = [Message("system", "one\n\ntwo"), Message("user", "q"), Message("assistant", "a")]
    assert parse_messages(values, "x") == want


@pytest.mark.parametrize(
    ("part", "medium"),
    [
        ({"type": "image_url", "image_url": {"url": "data:..."}}, "an image"),
        ({"type": "image", "image": "cat.png"}, "an image"),
        ({"type": "input_image"}, "an image"),
        ({"image": "cat.png"}, "an image"),
        ({"type": "video"}, "a video"),
        ({"type": "input_audio"}, "an audio"),
    ],
)
def test_media_are_refused_with_their_place(part: dict[str, object], medium: str) -> None:
    values = [
        {"role": "user", "content": "look"},
        {"role": "user", "content": [{"type": "text", "text": "x"}, part]},
    ]
    with pytest.raises(UsageError, match=rf"^file, message 2 holds {medium}, but huorn is text only$"):
        parse_messages(values, "file")


@pytest.mark.parametrize(
    "value",
    [
        {}, [5], [{}], [{"role": "robot", "content": "x"}], [{"role": ["user"], "content": "x"}], [{"role": "user"}],
        [{"role": "user", "content": 5}], [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "user", "content": ["x"]}],
    ],
)  # fmt: skip
def test_other_shapes_are_refused(value: object) -> None:
    with pytest.raises(UsageError, match=r"^file"):
        parse_messages(value, "file")


@pytest.mark.parametrize("data", [b"", b"{", b"\xff", b"[" * 100_000, b"[" + b"9" * 5000 + b"]"])
def test_files_that_are_no_json(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "chat.json"
    path.write_bytes(data)
    with pytest.raises(UsageError, match=r"chat\.json"):
        read_messages(path)


def test_files_that_are_not_there(tmp_path: Path) -> None:
    for path, reason in ((tmp_path / "none.json", "No such file or directory"), (tmp_path, "Is a directory")):
        with pytest.raises(UsageError, match=rf"^{path} can not be read: {reason}$"):
            read_messages(path)
    (tmp_path / "latin").write_bytes(b'["\xfc"]')
    with pytest.raises(UsageError, match=rf"^{tmp_path / 'latin'} is not UTF-8: byte 2 is 0xfc$"):
        read_messages(tmp_path / "latin")
    with pytest.raises(UsageError, match="can not be written"):
        write_messages(tmp_path / "none" / "chat.json", [])
    with pytest.raises(UsageError, match="can not be written: embedded null byte"):
        write_messages(tmp_path / "a\0b", [])
