"""manifest.json of a bank: SHA-256 of every file and int8 buffer, and of itself, so that one flipped bit anywhere is found."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from huorn.errors import UsageError, reason

MANIFEST = "manifest.json"
SCHEMA = "huorn bank manifest v1"
MOST_BYTES = 1 << 20  # of a manifest; one has 2,500
_ZEROS = "0" * 64
_OWN = re.compile(rb'"manifest_sha256": "([0-9a-f]{64})"')


def sha256_file(path: Path) -> str:
    """Hex. UsageError when it can not be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UsageError(f"{path} can not be read: {reason(error)}") from error


def sha256_tensor(tensor: Tensor) -> str:
    """Hex, of its bytes in row-major order."""
    return hashlib.sha256(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()).hexdigest()


def manifest_text(files: Mapping[str, str], int8: Mapping[str, Tensor], more: Mapping[str, Any]) -> str:
    """The file, with `files` name -> sha256, the checksums of int8 buffers, and what else is to be kept."""
    value = {
        "schema": SCHEMA,
        "files": dict(sorted(files.items())),
        "int8": {name: sha256_tensor(tensor) for name, tensor in sorted(int8.items())},
        **more,
        "manifest_sha256": _ZEROS,
    }
    text = json.dumps(value, indent=1) + "\n"
    return text.replace(_ZEROS, hashlib.sha256(text.encode()).hexdigest())


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a bank. UsageError when it is missing, of another schema, or has been changed."""
    path = folder / MANIFEST
    if path.exists() and (not path.is_file() or path.stat().st_size > MOST_BYTES):
        raise UsageError(f"{path} is no regular file of at most {MOST_BYTES:,} bytes")
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path} can not be read: {reason(error)}; a bank has one") from error
    own = _OWN.search(data)
    if own is None or len(_OWN.findall(data)) != 1:
        raise UsageError(f"{path} is damaged: it does not say its own checksum once")
    blank = data[: own.start(1)] + _ZEROS.encode() + data[own.end(1) :]
    if hashlib.sha256(blank).hexdigest().encode() != own[1]:
        raise UsageError(f"{path} is damaged or was changed: its SHA-256 is not the one it says")
    value: dict[str, Any] = json.loads(data)
    if value.get("schema") != SCHEMA:
        raise UsageError(
            f"{path} has the schema {value.get('schema')!r}, but this version of huorn reads {SCHEMA!r}"
        )
    return value


def check_files(folder: Path, manifest: Mapping[str, Any]) -> None:
    """UsageError naming the first file that is missing or is not what the manifest says."""
    for name, wanted in manifest["files"].items():
        if Path(name).name != name:
            raise UsageError(f"{folder / MANIFEST} names {name!r}, which is no file of the folder itself")
        if not (folder / name).is_file():
            raise UsageError(f"{folder / name} is missing, but {MANIFEST} lists it")
        if sha256_file(folder / name) != wanted:
            raise UsageError(
                f"{folder / name} is damaged or was changed: its SHA-256 is not that of {MANIFEST}"
            )
