"""Checksums of a folder's files: huorn-manifest.json, or SHA256SUMS as `sha256sum` writes it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huorn.checkpoint.config import read_json
from huorn.errors import CheckpointError, reason

MANIFEST = "huorn-manifest.json"
SUMS = "SHA256SUMS"

_SUM_LINE = re.compile(r"([0-9a-fA-F]{64}) [ *](.+)")


@dataclass(frozen=True)
class FileSum:
    """What a file must be: SHA-256 in lower-case hex, and its size in bytes where the manifest gives it."""

    sha256: str
    size: int | None


def find_manifest(directory: Path) -> Path | None:
    """The manifest that lies in the folder, if one does."""
    return next((path for name in (MANIFEST, SUMS) if (path := directory / name).is_file()), None)


def read_manifest(path: Path) -> dict[str, FileSum]:
    """File name -> checksum, out of {"files": {NAME: {"sha256": HEX, "size": BYTES}}} or of sha256sum lines.

    Raises CheckpointError when the manifest is missing, of another form, or names a file outside the folder.
    """
    sums = _from_json(path, read_json(path)) if path.suffix == ".json" else _from_lines(path)
    for name in sums:
        if not name.isprintable() or any(c in name for c in "/\\") or name in ("", ".", ".."):
            raise CheckpointError(f"{path} names {name!r}; a manifest lists plain file names of its folder")
    return sums


def _from_json(path: Path, value: Mapping[str, Any]) -> dict[str, FileSum]:
    files = value.get("files")
    if not isinstance(files, dict):
        raise CheckpointError(f"{path} has no object named files; a manifest maps each file to its sha256")
    sums: dict[str, FileSum] = {}
    for name, entry in files.items():
        sha256 = entry.get("sha256") if isinstance(entry, dict) else None
        size = entry.get("size") if isinstance(entry, dict) else None
        if not isinstance(sha256, str) or not re.fullmatch("[0-9a-fA-F]{64}", sha256):
            raise CheckpointError(f"{path}: {name} has no sha256 of 64 hex digits")
        if size is not None and type(size) is not int:
            raise CheckpointError(f"{path}: {name} has a size that is no number of bytes")
        sums[name] = FileSum(sha256.lower(), size)
    return sums


def _from_lines(path: Path) -> dict[str, FileSum]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} can not be read as a list of checksums: {reason(error)}") from error
    sums: dict[str, FileSum] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        match = _SUM_LINE.fullmatch(line)
        if match is None:
            raise CheckpointError(
                f"{path}, line {number}: expected 64 hex digits, two spaces and a file name"
            )
        sums[match[2].removeprefix("./")] = FileSum(match[1].lower(), None)
    if not sums:
        raise CheckpointError(f"{path} lists no file; expected lines as sha256sum writes them")
    return sums
