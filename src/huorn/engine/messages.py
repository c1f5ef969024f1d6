"""The messages of a conversation, and the file format of /save and --load."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast, get_args

from huorn.errors import UsageError, reason
from huorn.files import decode_utf8, write_atomically

Role = Literal["system", "user", "assistant"]


@dataclass(frozen=True)
class Message:
    """One turn of a conversation, text only."""

    role: Role
    content: str

    def for_template(self) -> dict[str, str]:
        """Return the mapping that chat templates expect."""
        return {"role": self.role, "content": self.content}


def parse_messages(values: object, origin: str) -> list[Message]:
    """Check decoded JSON, a list of {"role", "content"}, and return its messages with all system ones merged in front.

    `content` is a string or a list of {"type": "text", "text"} parts. The roles "developer" and "system" are one: templates
    refuse a second one, so their texts are joined. Raises UsageError that names `origin` and the message at fault, such as
    one with an image.
    """
    if not isinstance(values, list):
        raise UsageError(f"{origin} must hold a list of messages")
    messages = [
        _parse_message(value, f"{origin}, message {number}") for number, value in enumerate(values, start=1)
    ]
    system = [message.content for message in messages if message.role == "system"]
    others = [message for message in messages if message.role != "system"]
    return [Message("system", "\n\n".join(system)), *others] if system else others


def _parse_message(value: object, where: str) -> Message:
    if not isinstance(value, dict):
        raise UsageError(f'{where} must be an object with "role" and "content"')
    role = "system" if value.get("role") == "developer" else value.get("role")
    if role not in get_args(Role):
        raise UsageError(
            f"{where} has the role {role!r}, but it must be system, developer, user or assistant"
        )
    return Message(cast(Role, role), _parse_content(value.get("content"), where))


def _parse_content(content: object, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise UsageError(f"{where} has no text: its content must be a string or a list of text parts")
    return "".join(_parse_part(part, where) for part in content)


def _parse_part(part: object, where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(part, dict) and kind in (None, "text") and isinstance(part.get("text"), str):
        return cast(str, part["text"])
    keys: set[Any] = {kind, *part} if isinstance(part, dict) else set()
    media = next(
        (name for name in ("image", "video", "audio") if any(name in str(key) for key in keys)), None
    )
    if media is not None:
        article = "an" if media[0] in "ai" else "a"
        raise UsageError(f"{where} holds {article} {media}, but huorn is text only")
    raise UsageError(f'{where} has a content part that is no {{"type": "text", "text": ...}}')


def read_messages(path: Path) -> list[Message]:
    """Read a conversation as /save writes it. Raises UsageError when the file can not be read or holds something else."""
    try:
        values = json.loads(decode_utf8(path.read_bytes(), str(path)))
    except OSError as error:
        raise UsageError(f"{path} can not be read: {reason(error)}") from error
    except (ValueError, RecursionError) as error:  # ValueError also for a number of over 4,300 digits
        raise UsageError(f"{path} is not valid JSON: {error}") from error
    return parse_messages(values, str(path))


def write_messages(path: Path, messages: Sequence[Message]) -> None:
    """Write a conversation as a JSON list of {"role", "content"}. A file that was there is kept until the new one is whole.

    Raises UsageError when it can not be written.
    """
    text = json.dumps([message.for_template() for message in messages], ensure_ascii=False, indent=2)
    try:
        write_atomically(path, text + "\n")
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{path} can not be written: {reason(error)}; name a file in a folder that can be written"
        ) from error
