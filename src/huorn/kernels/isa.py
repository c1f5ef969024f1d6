"""Which variant of the kernels this process uses."""

from __future__ import annotations

import os

from huorn import _native
from huorn.errors import UsageError

VARIABLE = "HUORN_ISA"
ALL = ("portable", "avx2", "avx512", "amx")


def available() -> list[str]:
    """Variants this CPU and its system can run, the fastest last."""
    return _native.isas()


def chosen() -> str:
    """The fastest variant, or the one that HUORN_ISA forces. UsageError when this machine does not have that one."""
    have = available()
    wanted = os.environ.get(VARIABLE, "")
    if not wanted:
        return have[-1]
    if wanted not in have:
        known = "" if wanted in ALL else f" ({wanted!r} is none of {', '.join(ALL)})"
        raise UsageError(f"{VARIABLE} is {wanted!r}{known}, but this machine runs {', '.join(have)}")
    return wanted
