"""Each native kernel by itself, per instruction set, beside the limits measured in the same run.

Weights lie in one block of 4 GiB, far more than any cache, so kernels that read them once are limited by RAM (GB/s beside the
read bandwidth), and those that use them for many columns by the multiply instruction (GFLOP/s beside its peak).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from huorn import _native
from huorn.bench.yardstick import READ_BYTES, ReadYardstick, matmul_flops
from huorn.kernels import isa
from huorn.kernels.operand import BF16, F8
from huorn.schedule.plan import Plan
from huorn.schedule.shapes import columns

# The 35B shape.
HIDDEN, INTER, TOP_K, DK, DV, HEADS, KEY_HEADS = 2048, 512, 8, 128, 128, 32, 16
LINEAR_BYTES = 1 << 30  # read by one call of a memory-limited case
WIDE = 512  # columns of a compute-limited case: one chunk of a prompt
EXPERT_BYTES = 3 * HIDDEN * INTER

Unit = Literal["GB/s", "GFLOP/s"]


@dataclass(frozen=True)
class KernelCase:
    """One call to be timed: `amount` bytes read or floating-point operations done."""

    name: str
    unit: Unit
    amount: float
    call: Callable[[], None]


@dataclass(frozen=True)
class KernelSpeed:
    """Median speed of one kernel on one instruction set, in 1e9 units, and the limit of that kind (medians, same run)."""

    isa: str
    name: str
    unit: Unit
    speed: float
    limit: float

    @property
    def fraction(self) -> float:
        """Of the limit."""
        return self.speed / self.limit


def bench_kernels(threads: int, repeats: int) -> Iterator[KernelSpeed]:
    """Measure every kernel on every instruction set of this machine. UsageError when memory is short."""
    for name in isa.available():
        runtime = _native.Runtime(threads, name)
        yardstick = ReadYardstick(runtime)
        bench = _Bench(runtime, yardstick.block)
        cases = bench.cases()
        spent: dict[str, list[float]] = {case.name: [] for case in cases}
        bandwidths, peaks = list[float](), list[float]()
        for _ in range(repeats + 1):
            bandwidths.append(yardstick.read_bytes_s())
            peaks.append(matmul_flops(runtime))
            for case in cases:
                start = time.perf_counter()
                case.call()
                spent[case.name].append(time.perf_counter() - start)
        limits: dict[Unit, float] = {"GB/s": median(bandwidths[1:]), "GFLOP/s": median(peaks[1:])}
        for case in cases:
            speed = case.amount / median(spent[case.name][1:])
            yield KernelSpeed(name, case.name, case.unit, speed / 1e9, limits[case.unit] / 1e9)


class _Bench:
    """The cases on one runtime, with all that they point to."""

    def __init__(self, runtime: _native.Runtime, block: Tensor) -> None:
        self.runtime = runtime
        self.block = block
        self.scale = torch.ones(LINEAR_BYTES // 128)
        self.x = torch.randn(WIDE, 4096, generator=torch.Generator().manual_seed(0))
        self.y = torch.empty(16 * LINEAR_BYTES // 512)
        self.generator = np.random.default_rng(0)

    def cases(self) -> list[KernelCase]:
        found = [
            self.linear(f"linear {kind} [n, {width}], {count} columns", code, width, count)
            for kind, code, width in (
                ("F8", F8, 2048),
                ("F8", F8, 512),
                ("F8", F8, 4096),
                ("BF16", BF16, 2048),
            )
            for count in (1, 4, 16)
        ]
        found += [self.coded(f"lm_head INT8 [n, 2048], {count} columns", 2048, count) for count in (1, 4)]
        found += [
            self.wide(f"linear {kind} [8192, {width}], {WIDE} columns", code, width)
            for kind, code, width in (("F8", F8, 2048), ("F8", F8, 4096), ("BF16", BF16, 2048))
        ]
        found += [
            self.experts("experts, 1 token, per pair", 1),
            self.experts(f"experts, {WIDE} tokens, buckets", WIDE),
        ]
        return [*found, self.scan(1), self.scan(WIDE), self.attention(4096)]

    def matrix(self, rows: int, cols: int, code: int) -> _native.Matrix:
        return _native.Matrix(
            self.block.data_ptr(), self.scale.data_ptr() if code == F8 else 0, rows, cols, code
        )

    def linear(self, name: str, code: int, cols: int, count: int) -> KernelCase:
        rows = LINEAR_BYTES // (cols * (1 if code == F8 else 2))
        matrix = self.matrix(rows, cols, code)

        def call() -> None:
            self.runtime.linear(matrix, 0, 0.0, self.x.data_ptr(), count, count, self.y.data_ptr())

        return KernelCase(name, "GB/s", LINEAR_BYTES, call)

    def coded(self, name: str, cols: int, count: int) -> KernelCase:
        """The first pass of a two-pass lm_head."""
        rows = LINEAR_BYTES // cols
        bounds = torch.empty(2, count, rows)
        coded = _native.CodedRows(
            codes=self.block.data_ptr(), scale=self.scale.data_ptr(), spread=self.scale.data_ptr(), rows=rows, cols=cols,
            largest_x=1e30,
        )  # fmt: skip

        def call() -> None:
            self.runtime.bound_rows(
                coded, 0, 0.0, self.x.data_ptr(), count, bounds[0].data_ptr(), bounds[1].data_ptr()
            )

        return KernelCase(name, "GB/s", LINEAR_BYTES, call)

    def wide(self, name: str, code: int, cols: int) -> KernelCase:
        matrix, chunk = self.matrix(8192, cols, code), columns("cpu", self.runtime.isa, "dense")

        def call() -> None:
            self.runtime.linear(matrix, 0, 0.0, self.x.data_ptr(), WIDE, chunk, self.y.data_ptr())

        return KernelCase(name, "GFLOP/s", 2.0 * 8192 * cols * WIDE, call)

    def experts(self, name: str, tokens: int) -> KernelCase:
        """Experts all over the block, eight per token and the shared one, chosen anew for each call."""
        count = READ_BYTES // EXPERT_BYTES if tokens == 1 else 256
        part = HIDDEN * INTER
        starts = self.block.data_ptr() + EXPERT_BYTES * torch.arange(count)
        scales = torch.full((count, 3), self.scale.data_ptr())
        table = torch.cat(
            [torch.stack([starts, starts + part, starts + 2 * part], 1), scales], 1
        ).contiguous()
        shared = [
            self.matrix(INTER, HIDDEN, F8),
            self.matrix(INTER, HIDDEN, F8),
            self.matrix(HIDDEN, INTER, F8),
        ]
        layer = _native.ExpertLayer(
            experts=table.data_ptr(), format=F8, hidden=HIDDEN, inter=INTER,
            shared_gate=shared[0], shared_up=shared[1], shared_down=shared[2],
        )  # fmt: skip
        x, out = torch.randn(tokens, HIDDEN), torch.empty(tokens * (TOP_K + 1), HIDDEN)
        chunk = columns("cpu", self.runtime.isa, "expert")
        step = _native.Step(
            runtime=self.runtime, x=0, lengths=[tokens], columns=min(chunk, tokens), normed=x.data_ptr(),
            pair_out=out.data_ptr(), shared_out=out[tokens * TOP_K :].data_ptr(),
        )  # fmt: skip

        def call(alive: Sequence[Tensor] = (table, x, out)) -> None:
            for _ in range(16 if tokens == 1 else 1):
                ids = np.array(
                    [self.generator.choice(count, TOP_K, replace=False) for _ in range(tokens)],
                    dtype=np.int32,
                )
                plan = Plan.of(ids, chunk)
                step.run_plan(
                    layer,
                    *plan.addresses,
                    TOP_K,
                    True,
                )

        if tokens == 1:
            return KernelCase(name, "GB/s", 16.0 * (TOP_K + 1) * EXPERT_BYTES, call)
        return KernelCase(name, "GFLOP/s", 2.0 * tokens * (TOP_K + 1) * EXPERT_BYTES, call)

    def scan(self, tokens: int) -> KernelCase:
        """A whole delta-net block; with one token its weights limit it, with many the products."""
        channels = 2 * KEY_HEADS * DK + HEADS * DV
        weights = {
            "qkv": self.matrix(channels, HIDDEN, F8), "z": self.matrix(HEADS * DV, HIDDEN, F8),
            "b": self.matrix(HEADS, HIDDEN, BF16), "a": self.matrix(HEADS, HIDDEN, BF16),
            "out": self.matrix(HIDDEN, HEADS * DV, F8),
        }  # fmt: skip
        ones, taps = torch.ones(HIDDEN), torch.full((4, channels), 0.25)
        rate = -ones
        layer = _native.DeltaNet(
            **weights, norm_scale=ones.data_ptr(), taps=taps.data_ptr(), negative_rate=rate.data_ptr(),
            dt_bias=ones.data_ptr(), gated_scale=ones.data_ptr(), eps=1e-6, hidden=HIDDEN, key_heads=KEY_HEADS,
            value_heads=HEADS, dk=DK, dv=DV, kernel=4,
        )  # fmt: skip
        conv, memory, x = (
            torch.zeros(2, 3, channels),
            torch.zeros(2, HEADS, DK, DV),
            torch.randn(tokens, HIDDEN),
        )
        rate = -ones
        chunk = min(tokens, columns("cpu", self.runtime.isa, "dense"))

        step = _native.Step(runtime=self.runtime, x=x.data_ptr(), lengths=[tokens], columns=chunk)
        step.linear_states(
            [conv[0].data_ptr()], [conv[1].data_ptr()], [memory[0].data_ptr()], [memory[1].data_ptr()]
        )

        def call(alive: Sequence[Tensor] = (ones, taps, rate, conv, memory, x)) -> None:
            step.delta_net(layer, None, 0)

        macs = HIDDEN * (channels + 2 * HEADS * DV + 2 * HEADS)
        read = macs + 4 * HEADS * DK * DV
        name = f"delta-net block, {tokens} token{'s' * (tokens > 1)}"
        return (
            KernelCase(name, "GB/s", read, call)
            if tokens == 1
            else KernelCase(name, "GFLOP/s", 2.0 * tokens * macs, call)
        )

    def attention(self, position: int) -> KernelCase:
        """A whole full-attention block for one token behind `position` others."""
        heads, kv_heads, dim = 16, 2, 256
        ones = torch.ones(HIDDEN)
        layer = _native.Attention(
            q=self.matrix(2 * heads * dim, HIDDEN, F8), k=self.matrix(kv_heads * dim, HIDDEN, F8),
            v=self.matrix(kv_heads * dim, HIDDEN, F8), o=self.matrix(HIDDEN, heads * dim, F8),
            norm_scale=ones.data_ptr(), q_scale=ones.data_ptr(), k_scale=ones.data_ptr(), eps=1e-6, hidden=HIDDEN,
            heads=heads, kv_heads=kv_heads, head_dim=dim, rotary_dim=64,
        )  # fmt: skip
        cache = torch.zeros(2, position + 1, kv_heads, dim, dtype=torch.bfloat16)
        x, turn = torch.randn(1, HIDDEN), torch.ones(32)

        step = _native.Step(runtime=self.runtime, x=x.data_ptr(), lengths=[1], columns=1)
        step.caches(
            [cache[0].data_ptr()], [cache[1].data_ptr()], [position], turn.data_ptr(), turn.data_ptr()
        )

        def call(alive: Sequence[Tensor] = (ones, cache, x, turn)) -> None:
            step.attention(layer, None, 0)

        read = HIDDEN * dim * (3 * heads + 2 * kv_heads) + cache.nbytes
        return KernelCase(f"attention block, 1 token behind {position}", "GB/s", read, call)
