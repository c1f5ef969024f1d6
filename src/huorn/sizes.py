"""Sizes as people write them: "12GiB", "16 GB", "2000MiB"."""

from __future__ import annotations

import re

from huorn.errors import UsageError

_UNITS = {"": 1, "B": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("KMGT", start=1)
    for suffix, base in (("", 1024), ("iB", 1024), ("B", 1000))
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(text: str, option: str) -> int:
    """Bytes of "12GiB" (1024-based), "12GB" (1000-based), "12G" (as 12GiB) or a plain number; units in any case.

    Raises UsageError, naming the option, for anything else, zero included: no size means "off".
    """
    found = _SIZE.fullmatch(text)
    by_name = {name.lower(): factor for name, factor in _UNITS.items()}
    factor = by_name.get(found[2].lower()) if found else None
    if found is None or factor is None or float(found[1]) * factor < 1:
        raise UsageError(f"{option} is {text!r}, but it must be a size such as 12GiB, 12GB or 2000MiB")
    return int(float(found[1]) * factor)
