"""How many bytes of RAM a model needs: what must be resident, what is only mapped, and the state of one request."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

from huorn.checkpoint.config import ModelConfig
from huorn.checkpoint.names import SCALE_SUFFIX
from huorn.checkpoint.reader import Checkpoint
from huorn.checkpoint.tensor_check import kind_of
from huorn.model.cpu_decoder import work_bytes
from huorn.model.precision import Precision
from huorn.model.state import state_bytes
from huorn.model.tables import LmHead, Tables
from huorn.schedule.shapes import PREFILL_CHUNK

# First match wins; what no pattern matches is a router, a shared expert's gate or a norm.
_GROUPS = {
    "embedding": "embed_tokens.",
    "output head": "lm_head.",
    "linear attention": ".linear_attn.",
    "full attention": ".self_attn.",
    "shared experts": ".mlp.shared_expert.",
    "routed experts": ".mlp.experts.",
}
_REST = "routers and norms"
_PROGRAM = "Python, PyTorch, tokenizer"
_HEAP_BYTES = (
    96 << 20
)  # what nobody counts: pages of the heap neither used nor given back, stacks, the interpreter's growth
STATE_COPIES = 3  # of one request: the one at hand, the one being written, and where a chat comes back to


@dataclass(frozen=True)
class MemoryLine:
    """One line of a budget; `resident` False: mapped from the file, in RAM only as far as the kernel caches it."""

    name: str
    bytes: int
    resident: bool


@dataclass(frozen=True)
class MemoryBudget:
    """What one model with one request takes."""

    lines: tuple[MemoryLine, ...]

    def and_line(self, name: str, count: int) -> MemoryBudget:
        """With `count` bytes more in RAM."""
        return MemoryBudget((*self.lines, MemoryLine(name, count, True)))

    @property
    def resident_bytes(self) -> int:
        """Bytes that must stay in RAM, the program's own included."""
        return sum(line.bytes for line in self.lines if line.resident)

    @property
    def read_per_token_bytes(self) -> int:
        """Of weights that every token needs but the embedding, of which it reads a row."""
        groups = {*_GROUPS, _REST} - {"embedding", "routed experts"}
        return sum(line.bytes for line in self.lines if line.name in groups)

    @property
    def mapped_bytes(self) -> int:
        """Bytes that are read from the checkpoint when they are used."""
        return sum(line.bytes for line in self.lines if not line.resident)

    @property
    def program_bytes(self) -> int:
        """What Python and PyTorch hold before a model is opened."""
        return next(line.bytes for line in self.lines if line.name == _PROGRAM)

    def rows(self) -> list[tuple[str, str, str]]:
        """(what, size, where) in print order, the sum of what is resident last."""
        table = [
            (line.name, format_bytes(line.bytes), "in RAM" if line.resident else "on disk, read when used")
            for line in self.lines
        ]
        return [*table, ("resident in all", format_bytes(self.resident_bytes), "in RAM")]


def checkpoint_budget(
    checkpoint: Checkpoint,
    context: int,
    precision: Precision,
    resident: bool,
    threads: int = 1,
    lm_head: LmHead = "two-pass",
) -> MemoryBudget:
    """Budget of an open checkpoint on the native kernels, from its headers alone: no tensor is read.

    They hold weights as stored, in F32 precision all expanded, but for the tables (model/tables.py); the routed experts are
    `resident` or on disk.
    """
    text = {name: info for name, info in checkpoint.infos.items() if kind_of(name) == "text"}
    tables = Tables.of(checkpoint, precision, lm_head)
    if precision is Precision.F32:
        sizes = {n: 4 * prod(info.shape) for n, info in text.items() if not n.endswith(SCALE_SUFFIX)}
    else:
        sizes = {n: tables.held_bytes(n, info.nbytes) for n, info in text.items()}
    return memory_budget(
        sizes, checkpoint.config, context, precision, resident_set_bytes(), threads, experts_resident=resident
    )


def memory_budget(
    sizes: Mapping[str, int],
    config: ModelConfig,
    context: int,
    precision: Precision,
    program_bytes: int,
    threads: int = 1,
    experts_resident: bool = False,
) -> MemoryBudget:
    """Budget from the bytes that each text tensor takes (name, with or without prefix -> bytes)."""
    groups = dict.fromkeys([*_GROUPS, _REST], 0)
    scales = 0
    for name, nbytes in sizes.items():
        if not experts_resident and ".mlp.experts." in name and name.endswith(SCALE_SUFFIX):
            scales += 2 * nbytes  # kept in F32, stored in BF16 or F32
        groups[next((group for group, part in _GROUPS.items() if part in name), _REST)] += nbytes
    kv, recurrent = state_bytes(config, context, precision)
    weights = [
        MemoryLine(group, nbytes, group != "routed experts" or experts_resident)
        for group, nbytes in groups.items()
        if nbytes
    ]
    if scales:
        weights.append(MemoryLine("scales of routed experts", scales, True))
    state = [
        MemoryLine(f"keys and values of {context:,} tokens", kv, True),
        MemoryLine(f"delta-net state, {STATE_COPIES} copies", STATE_COPIES * recurrent, True),
        MemoryLine("heap and threads", _HEAP_BYTES, True),
        MemoryLine(
            f"work on {PREFILL_CHUNK} tokens at once", work_bytes(config, PREFILL_CHUNK, threads), True
        ),
    ]
    return MemoryBudget((MemoryLine(_PROGRAM, program_bytes, True), *weights, *state))


def resident_set_bytes(statm: Path = Path("/proc/self/statm")) -> int:
    """What this process holds in RAM now, 0 where there is no /proc: after imports, Python and PyTorch themselves."""
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.exists() else 0


def format_bytes(count: int) -> str:
    """ "3.5 GB", "63.0 MB", "512 bytes": decimal units, as disks and link speeds are sold in."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("KB", 10**3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"
