"""What memory costs that nobody touched for a while, and what that does to decoding.

On a virtual machine whose host takes mappings away from idle memory (page-access tracking, migration), the next touch traps into
the host, here for 0.1 ms per 2 MiB. No instruction hides that: prefetches to such a page are dropped. A model's experts are
mostly idle memory.

    python benchmarks/idle_memory.py                 # touches after 0 to 10 s
    python benchmarks/idle_memory.py --model DIR     # also: decode steps with new experts beside steps with the same ones
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from statistics import median

import torch

from huorn.bench.yardstick import ReadYardstick
from huorn.engine.session import Session
from huorn.kernels.huge_pages import HUGE, HugePages
from huorn.model.cpu_decoder import CpuDecoder
from huorn.model.state import DecodeState

SLOW = 20e-6  # a touch that took longer went through the host: others take 1 us


def touches() -> None:
    """Share of pages of 4 GiB whose first touch after a pause is slow."""
    memory = HugePages(4 << 30).take(4 << 30)
    memory.fill_(1)
    pages = memory.numpy()[::HUGE]
    for pause in (0.0, 0.0, 0.5, 1.0, 2.0, 5.0, 10.0):
        time.sleep(pause)
        took = []
        for page in range(len(pages)):
            start = time.perf_counter()
            pages[page].item()
            took.append(time.perf_counter() - start)
        slow = [seconds for seconds in took if seconds > SLOW]
        mean = 1e6 * sum(slow) / max(1, len(slow))
        print(f"after {pause:4.1f} s: {len(slow) / len(took):6.1%} of touches slow, {mean:.0f} us each")


def steps(directory: Path) -> None:
    """Decode steps of random tokens beside steps that route as the step before did."""
    session = Session.open(directory)
    decoder = session.decoder
    assert isinstance(decoder, CpuDecoder)
    yardstick = ReadYardstick(decoder.runtime)
    ids = torch.randint(0, session.config.vocab_size, (48,), generator=torch.Generator().manual_seed(0))
    for _ in range(5):
        bandwidth = yardstick.read_bytes_s()
        for same in (False, True):
            state, spent, read = DecodeState.new(session.config, 64, decoder.precision), [], 0
            for place in range(48):
                if same:  # the same token in an empty sequence: the same experts
                    state = DecodeState.new(session.config, 64, decoder.precision)
                before, seconds = sum(decoder.runtime.counters()), decoder.runtime.seconds()
                decoder.next_token(ids[:1] if same else ids[place : place + 1], state).largest(1)
                spent.append(decoder.runtime.seconds() - seconds)
                read = sum(decoder.runtime.counters()) - before
            rate = read / median(spent[8:])
            print(
                f"{'same' if same else 'new '} experts: {1e3 * median(spent[8:]):.1f} ms in kernels, {rate / 1e9:.1f} of "
                f"{bandwidth / 1e9:.1f} GB/s = {rate / bandwidth:.2f}"
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="a checkpoint whose experts fit into memory")
    model = parser.parse_args().model
    touches()
    if model is not None:
        steps(model)
