"""Both engines of the native reader, both ways of reading, and files to read."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from huorn._native import Reader

from .memory import BLOCK
from .native import SIZES


@pytest.fixture(params=["io_uring", "threads"])
def engine(request: pytest.FixtureRequest) -> str:
    if request.param == "io_uring" and Reader(1, BLOCK, False, True).engine != "io_uring":
        pytest.skip("this system has no io_uring")
    return str(request.param)


@pytest.fixture(params=["direct", "buffered"])
def direct(request: pytest.FixtureRequest) -> bool:
    return bool(request.param == "direct")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder, contents = tmp_path_factory.mktemp("files"), random.Random(0)
    paths = [folder / f"{size}.bin" for size in SIZES]
    for path, size in zip(paths, SIZES, strict=True):
        path.write_bytes(contents.randbytes(size))
    return paths
