"""How the rows of a trace lie in its files: little-endian records without gaps."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Literal

import numpy as np

Captured = Literal["hidden", "logits", "ids", "weights"]  # of every row and layer
CAPTURED: tuple[Captured, ...] = ("hidden", "logits", "ids", "weights")

MANIFEST = "manifest.json"
ROWS = "rows.bin"
# Of one row: the token `id` was read at `position` as token `step` of the recorded ones of a prompt (its index in the manifest),
# and `next_id` came after it. What a recording does not know is -1.
ROW = np.dtype([(name, "<i4") for name in ("prompt", "step", "position", "id", "next_id")])
MOST_EXPERTS = 2**15  # ids are i2


def layer_record(captured: Collection[str], hidden: int, experts: int, top_k: int) -> np.dtype[Any]:
    """What one layer did for one row: hidden f2 [D], logits f2 [E], ids i2 [K], weights f4 [K]; only what was `captured`.

    4,656 bytes in the 35B shape, so a row of 40 layers takes 186 KB.
    """
    fields = {
        "hidden": ("<f2", (hidden,)),
        "logits": ("<f2", (experts,)),
        "ids": ("<i2", (top_k,)),
        "weights": ("<f4", (top_k,)),
    }
    return np.dtype([(name, *fields[name]) for name in CAPTURED if name in captured])


def layer_file(layer: int) -> str:
    """Name of the file of one layer in a chunk folder."""
    return f"layer-{layer:02d}.bin"


def chunk_folder(number: int) -> str:
    """Name of the folder of chunk `number`; while it is written, a dot stands before it and ".partial" behind."""
    return f"chunk-{number:05d}"
