"""A whole bank of expert predictors in one call: time, and bytes per second beside what a plain loop reads in turn with it.

python benchmarks/score_bank.py      # random banks of the 35B shape: 34 and 40 heads, trunks of 512 and 128; takes 2 GB of RAM
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor

from huorn import _native
from huorn.kernels import isa
from huorn.kernels.huge_pages import HugePages, padded
from huorn.predictor.bank_files import int8_bank
from huorn.predictor.native_scorer import NativeScorer

FEATURES, HIDDEN, EXPERTS, GROUPS = 7489, 2048, 256, 3
# More than any level-3 cache. A token reads as much between two calls; small banks would be read from the cache otherwise.
BLOCK_BYTES = 1 << 30


def on_huge_pages(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Where an engine has them (huorn.predictor.served_bank)."""
    room = HugePages(sum(padded(tensor.nbytes) for tensor in tensors.values()))
    return {
        name: room.take(tensor.nbytes).view(tensor.dtype).view(tensor.shape).copy_(tensor)
        for name, tensor in tensors.items()
    }


def random_bank(heads: int, width: int) -> dict[str, Tensor]:
    """Tensors as int8_bank names them, codes uniform; scales such that no sum leaves the usual range."""
    outputs = GROUPS * EXPERTS + HIDDEN
    tensors = {"a": torch.ones(heads, GROUPS), "b": torch.zeros(heads, GROUPS)}
    for name, rows, cols in (("in", width, FEATURES), ("out", outputs, width), ("router", EXPERTS, HIDDEN)):
        cols = -(-cols // int8_bank.GROUP) * int8_bank.GROUP
        tensors[f"w_{name}.codes"] = torch.randint(-127, 128, (heads, rows, cols), dtype=torch.int8)
        tensors[f"w_{name}.scale"] = torch.rand(heads, rows, cols // int8_bank.GROUP) / (73 * cols**0.5)
        tensors[f"b_{name}"] = torch.randn(heads, rows)
    return tensors


def measure(heads: int, width: int, block: Tensor, runtime: _native.Runtime, rounds: int) -> None:
    """Prints one line; the loop reads `block` before each call that it judges, and leaves nothing of the bank in a cache."""
    torch.manual_seed(0)
    scorer = NativeScorer(on_huge_pages(random_bank(heads, width)), runtime)
    x, base = torch.randn(heads, FEATURES).bfloat16(), torch.randn(heads, HIDDEN).bfloat16()
    loop, calls, again, shares = list[float](), list[float](), list[float](), list[float]()
    for _ in range(rounds):
        before, cold, warm = (
            seconds(lambda: runtime.read_memory(block.data_ptr(), len(block))),
            seconds(lambda: scorer.score(x, base)),
            seconds(lambda: scorer.score(x, base)),
        )
        loop.append(len(block) / before)
        calls.append(cold)
        again.append(warm)
        shares.append(scorer.nbytes / cold / loop[-1])
    speed = scorer.nbytes / median(calls)
    print(f"{heads} heads, trunk {width}: {scorer.nbytes / 1e6:.1f} MB, {1e3 * median(calls):.2f} ms per call "
          f"({1e3 * min(calls):.2f} to {1e3 * max(calls):.2f}; {1e3 * median(again):.2f} when called again at once), "
          f"{speed / 1e9:.1f} GB/s = {median(shares):.0%} of the read loop's {median(loop) / 1e9:.1f}", flush=True)  # fmt: skip


def seconds(call: Callable[[], object]) -> float:
    """What one call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=25)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # as in a session: its threads would spin against those of the kernels
    runtime = _native.Runtime(arguments.threads, isa.chosen())
    block = HugePages(BLOCK_BYTES).take(BLOCK_BYTES).fill_(0x35)
    print(f"{runtime.isa}, {runtime.threads} threads")
    for heads in (34, 40):
        for width in (512, 128):
            measure(heads, width, block, runtime, arguments.rounds)
