"""The errors a user can cause. Their message is the one sentence that the command line prints."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ValidationError

_LONGEST_MESSAGE = 600


def one_line(text: str) -> str:
    """`text` as one printable line: names out of a damaged file may hold newlines or lone surrogates."""
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
    if len(shown) > _LONGEST_MESSAGE:
        half = _LONGEST_MESSAGE // 2
        shown = f"{shown[:half]} ... {shown[-half:]}"
    return shown


def reason(error: Exception) -> str:
    """Why, in a few words: the system's own for an OSError, without its number and its path, which the sentence names."""
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def first_problem(error: ValidationError) -> str:
    """Where a value is wrong, and why: the first of Pydantic's problems."""
    first = error.errors()[0]
    where, what = ".".join(str(part) for part in first["loc"]), first["msg"].removeprefix("Value error, ")
    return f"{where}: {what}" if where else what


class HuornError(Exception):
    """Base of every error meant for a user: one sentence, printed as `error: ...` with exit code 2."""

    def __init__(self, message: str) -> None:
        """Keeps `message` as one printable line."""
        super().__init__(one_line(message))


class CheckpointError(HuornError):
    """A file of a checkpoint is missing, damaged or of another kind."""


class TraceError(HuornError):
    """A recorded trace that is missing, damaged or of another kind."""


class UsageError(HuornError):
    """An argument, option or prompt that can not be used."""
