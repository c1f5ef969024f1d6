"""Sizes as people write them."""

from __future__ import annotations

import pytest

from huorn.errors import UsageError
from huorn.sizes import parse_bytes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("12GiB", 12 * 2**30),
        ("12gib", 12 * 2**30),
        ("12G", 12 * 2**30),
        ("12GB", 12 * 10**9),
        (" 2000 MiB ", 2000 * 2**20),
        ("1.5GiB", 3 * 2**29),
        ("4096", 4096),
        ("7 B", 7),
        ("1T", 2**40),
        ("3k", 3072),
    ],
)
def test_sizes(text: str, expected: int) -> None:
    assert parse_bytes(text, "--memory") == expected


@pytest.mark.parametrize(
    "text", ["", "-1", "-1GiB", "0", "0GiB", "GiB", "12XB", "1e9", "nan", "inf", "12 G iB", "0.1B", "1,5GiB"]
)
def test_everything_else_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"--memory is .* must be a size such as 12GiB"):
        parse_bytes(text, "--memory")
