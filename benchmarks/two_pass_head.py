"""The two-pass lm_head of one checkpoint by itself: speed of its passes, rows multiplied again, equality with the full product.

python benchmarks/two_pass_head.py --model DIR      # reads lm_head alone; hidden states are Gaussian
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from statistics import median

import torch

from huorn import _native
from huorn.checkpoint.reader import Checkpoint
from huorn.kernels import isa
from huorn.kernels.huge_pages import HugePages
from huorn.model.head import Norm
from huorn.model.tables import coded_bytes
from huorn.model.two_pass_head import TwoPassHead

TOKENS = 20


def measure(directory: Path, threads: int) -> None:
    """Prints one line per quantity; the read loop runs between the passes that it judges."""
    torch.set_num_threads(1)  # as in a session: its threads would spin against those of the kernels
    checkpoint = Checkpoint.open(directory)
    config, runtime = checkpoint.config, _native.Runtime(threads, isa.chosen())
    room = HugePages(coded_bytes(config)).take(coded_bytes(config))
    norm = Norm(1.0 + checkpoint.tensor("norm.weight").float(), config.rms_norm_eps)
    table = checkpoint.row_table("lm_head.weight")
    start = time.perf_counter()
    head = TwoPassHead.build(table, norm, runtime, room)
    built = time.perf_counter() - start
    print(f"{runtime.isa}, {threads} threads: codes of {list(table.shape)} made in {built:.1f} s, "
          f"{runtime.seconds():.1f} s of it in kernels")  # fmt: skip
    whole = len(room) >> 20 << 20
    states = torch.randn(TOKENS, config.hidden_size, generator=torch.Generator().manual_seed(0))
    for k in (1, 20):
        loop, passes, rest = list[float](), list[float](), list[float]()
        rows = head.counts.rescored_rows
        for x in states.split(1):
            start = time.perf_counter()
            runtime.read_memory(room.data_ptr(), whole)
            loop.append(whole / (time.perf_counter() - start))
            kernel = runtime.seconds()
            start = time.perf_counter()
            head.next_tokens(runtime, x, 1)[0].largest(k)
            passes.append(len(room) / (runtime.seconds() - kernel))
            rest.append(time.perf_counter() - start - (runtime.seconds() - kernel))
        speed, limit = median(passes) / 1e9, median(loop) / 1e9
        again = (head.counts.rescored_rows - rows) / TOKENS
        print(f"the {k} largest: {again:.1f} rows in BF16 a token, {speed:.1f} GB/s in kernels = {speed / limit:.0%} of "
              f"{limit:.1f}, {1e3 * median(rest):.2f} ms outside")  # fmt: skip
    start = time.perf_counter()
    logits = head.full(runtime, states, 16)
    print(f"full product from the file, {TOKENS} tokens: {time.perf_counter() - start:.2f} s")
    for x, expected in zip(states.split(1), logits, strict=True):
        found = head.next_tokens(runtime, x, 1)[0].largest(20)
        assert found.ids is not None
        assert torch.equal(found.logits, expected[found.ids])
        assert set(expected.topk(20).indices.tolist()) <= set(found.ids.tolist())
    print("all equal")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="a checkpoint")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    measure(arguments.model, arguments.threads)
