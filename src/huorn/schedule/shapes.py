"""How many columns (tokens) one pass over a weight takes: data, each entry with the measurement that chose it.

Only speed depends on it: every output element is summed in the same order for any number of columns.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

# Tokens per forward while a prompt is read. Larger chunks read expert weights fewer times but hold more activations.
PREFILL_CHUNK = 512

Use = Literal["dense", "expert"]


class Columns(NamedTuple):
    """Most columns per pass, and why."""

    most: int
    measured: str


# (backend, ISA, use); formats share an entry where they measured alike.
_COLUMNS: dict[tuple[str, str, Use], Columns] = {
    ("cpu", "amx", "dense"): Columns(128, "8192 x 2048 F8, 512 columns: 64 526, 128 1089, 256 1152, 512 869 GFLOP/s; "
                                     "8192 x 4096: 648, 1122, 906, 736"),
    ("cpu", "amx", "expert"): Columns(128, "as dense; a bucket of 512 tokens of the 35B shape holds 16 on average"),
    ("cpu", "avx512", "dense"): Columns(128, "8192 x 2048 F8, 512 columns: 64 131, 128 139, 256 127, 512 73 GFLOP/s"),
    ("cpu", "avx512", "expert"): Columns(64, "8192 x 512 F8: 64 108, 128 130; smaller buckets leave packing room in L1"),
    ("cpu", "avx2", "dense"): Columns(64, "not tuned: 64 columns of F32 operands at 2,048 inputs are 512 KB"),
    ("cpu", "avx2", "expert"): Columns(64, "as dense"),
    ("cpu", "portable", "dense"): Columns(64, "as avx2"),
    ("cpu", "portable", "expert"): Columns(64, "as avx2"),
}  # fmt: skip


def columns(backend: str, isa: str, use: Use) -> int:
    """Most columns per weight pass; KeyError for a combination that does not exist."""
    return _COLUMNS[backend, isa, use].most
