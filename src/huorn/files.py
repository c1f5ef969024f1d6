"""Files of a user: written whole or not at all, and read as UTF-8."""

from __future__ import annotations

import errno
import os
import secrets
import stat
from pathlib import Path

from huorn.errors import UsageError

PART_SUFFIX = ".part"  # of a file while it is written


def write_atomically(path: Path, text: str) -> None:
    """`path` has its old content or all of `text`, also after a crash; through a symbolic link its target is replaced.

    A lone surrogate (a byte of a file name that is no UTF-8) is written as `\\udcff`, which in JSON is itself again. What is
    no regular file, such as /dev/stdout, is written in place, and so is a file in a folder where no other can be made.
    Raises OSError; ValueError when the path holds NUL.
    """
    write_bytes_atomically(path, text.encode(errors="backslashreplace"))


def write_bytes_atomically(path: Path, data: bytes) -> None:
    """As write_atomically."""
    if path.exists() and not path.is_file():
        path.write_bytes(data)
        return
    target = Path(os.path.realpath(path))
    existing = target.stat() if target.exists() else None
    if existing is not None and not os.access(target, os.W_OK):  # renaming over it would not ask
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    temporary = target.with_name(f".huorn-{secrets.token_hex(8)}{PART_SUFFIX}")
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    except PermissionError:
        if existing is None:
            raise
        target.write_bytes(data)
        return
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            if existing is not None:
                os.fchmod(fd, stat.S_IMODE(existing.st_mode))
            os.fsync(fd)
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def decode_utf8(data: bytes, origin: str) -> str:
    """Return `data` as text. Raises UsageError that names `origin` and the byte at fault."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"{origin} is not UTF-8: byte {error.start} is 0x{data[error.start]:02x}") from error
