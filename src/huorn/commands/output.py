"""Standard streams and JSON files, so that a pipe gets exact text and a mistake is found before work starts."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from huorn.errors import UsageError, reason
from huorn.files import decode_utf8, write_atomically

# C0 and C1 controls but tab and newline: on a terminal they could move the cursor, rename the window or paste commands.
_CONTROLS = {
    **{code: chr(0x2400 + code) for code in range(0x20) if code not in (0x09, 0x0A)},  # "Control Pictures"
    0x7F: "\N{SYMBOL FOR DELETE}",
    **dict.fromkeys(range(0x80, 0xA0), "\N{REPLACEMENT CHARACTER}"),
}


class ModelText:
    """Writes generated text to stdout at once: exact UTF-8 into a pipe or file; on a terminal, controls are shown."""

    def __init__(self) -> None:
        self._terminal = sys.stdout.isatty()
        self._ends_line = True

    def write(self, piece: str) -> None:
        """Write and flush `piece`. Raises BrokenPipeError when the reader has gone."""
        self._ends_line = piece.endswith("\n") if piece else self._ends_line
        text = piece.translate(_CONTROLS) if self._terminal else piece
        sys.stdout.buffer.write(text.encode())
        sys.stdout.buffer.flush()

    def close_line(self) -> None:
        """End an unfinished line, on stderr, so that stdout holds the model's text and nothing else."""
        if not self._ends_line:
            print(file=sys.stderr)
            self._ends_line = True


def note(line: str) -> None:
    """Print one line about the work to stderr."""
    print(line, file=sys.stderr, flush=True)


def read_stdin() -> str:
    """Return all of stdin, unchanged. Raises UsageError when it is not UTF-8."""
    return decode_utf8(sys.stdin.buffer.read(), "stdin")


def argument_text(value: str, origin: str) -> str:
    """Return an argument as UTF-8 text, whatever the locale made of its bytes. Raises UsageError when they are something else."""
    return decode_utf8(os.fsencode(value), origin)


def check_json_path(path: Path | None) -> None:
    """Raise UsageError now when `path` can not be written later."""
    if path is None:
        return
    existed, target = path.exists(), Path(os.path.realpath(path))
    try:
        with path.open("ab"):
            pass
    except OSError as error:
        raise _can_not_write(path, error) from error
    if not existed:
        target.unlink()  # not `path`, which may be a link that waits for its target


def write_json(path: Path | None, value: dict[str, Any]) -> None:
    """Write `value` to `path` if there is one, whole or not at all. Raises UsageError when the disk refuses."""
    if path is None:
        return
    try:
        write_atomically(path, json.dumps(value, ensure_ascii=False, indent=2, allow_nan=False) + "\n")
    except OSError as error:
        raise _can_not_write(path, error) from error


def _can_not_write(path: Path, error: OSError) -> UsageError:
    return UsageError(
        f"--json {path} can not be written: {reason(error)}; name a file in a folder that can be written"
    )
