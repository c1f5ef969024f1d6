"""Where the time of a decoded token goes when experts are in slots, beside the sum that no engine of this kind can be under.

    python benchmarks/limited_terms.py --model DIR [--slots 0.25,0.5] [--tokens 48] [--json FILE]

The sum, over layers: mixer and router + max(copy of the misses with nothing else running, compute of what is resident and of the
shared expert); plus lm_head. All terms are measured in the same process, in turns with the decode that they are compared with.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np
import torch
from numpy.typing import NDArray

from huorn import _native
from huorn.bench.decode import PROMPT
from huorn.engine.fast_tier import Residency
from huorn.engine.sampling import Sampler, SamplingSettings
from huorn.engine.session import Session
from huorn.engine.tokenizer import encode
from huorn.experts.cache import ExpertCache
from huorn.experts.slots import SlotState
from huorn.model.cpu_decoder import CpuDecoder
from huorn.model.state import DecodeState


class Terms:
    """An ExpertTable around the cache that notes, per layer call, misses and the time of the first wave."""

    def __init__(self, cache: ExpertCache, runtime: _native.Runtime) -> None:
        self.cache, self.runtime = cache, runtime
        self.misses: list[int] = []
        self.resident_s: list[float] = []
        self.kernel_s = 0.0  # inside waves

    def __getattr__(self, name: str) -> object:
        return getattr(self.cache, name)

    def waves(self, layer: int, ids: NDArray[np.int32]) -> Iterator[list[int]]:
        began, before = self.runtime.seconds(), self.cache.counts.misses
        groups = self.cache.waves(layer, ids)
        first = next(groups)
        self.misses.append(self.cache.counts.misses - before)
        start = time.perf_counter()
        yield first
        self.resident_s.append(time.perf_counter() - start)
        yield from groups
        self.kernel_s += self.runtime.seconds() - began


def copy_seconds(cache: ExpertCache, repeats: int) -> list[float]:
    """Median seconds to copy 0, 1, .. 8 experts with nothing else running."""
    picks, keys = random.Random(0), range(len(cache.store.runs))
    found = [0.0]
    for count in range(1, 9):
        took = []
        for _ in range(repeats):
            absent = [key for key in keys if cache.slots.state(key) is SlotState.EMPTY]
            layer = picks.randrange(cache.store.checkpoint.config.num_hidden_layers)
            experts = cache.store.checkpoint.config.num_experts
            absent = [key - layer * experts for key in absent if key // experts == layer]
            wanted = picks.sample(absent, count)
            start = time.perf_counter()
            for _ in cache.waves(layer, np.array([wanted], dtype=np.int32)):
                pass
            took.append(time.perf_counter() - start)
        found.append(median(took))
    return found


def generate(decoder: CpuDecoder, prompt: torch.Tensor, tokens: int) -> tuple[list[int], list[float]]:
    """Token ids by greedy choice after a fixed start, and seconds per step."""
    state, sampler = DecodeState.new(decoder.config, 512, decoder.precision), Sampler(SamplingSettings(), [])
    token = torch.tensor([sampler.pick(decoder.next_token(prompt, state))])
    ids, spent = [], []
    for _ in range(tokens):
        start = time.perf_counter()
        left = state.conv, state.recurrent
        token = torch.tensor([sampler.pick(decoder.next_token(token, state))])
        state.reuse(*left)
        spent.append(time.perf_counter() - start)
        ids.append(int(token))
    return ids, spent


def measure(session: Session, tokens: int, rounds: int) -> dict[str, float]:
    decoder, cache = session.decoder, session.cache
    assert isinstance(decoder, CpuDecoder)
    assert cache is not None
    prompt = torch.tensor(encode(session.tokenizer, PROMPT)[:32])
    generate(decoder, prompt, tokens)  # warm
    real, sums, parts = [], [], []
    for _ in range(rounds):
        _, spent = generate(decoder, prompt, tokens)
        real.append(sum(spent) / tokens)
        terms = Terms(cache, decoder.runtime)
        slow = replace(decoder, quick_pairs=False, experts=terms)
        state, sampler = (
            DecodeState.new(decoder.config, 512, decoder.precision),
            Sampler(SamplingSettings(), []),
        )
        token = torch.tensor([sampler.pick(slow.next_token(prompt, state))])
        terms.misses.clear()
        terms.resident_s.clear()
        terms.kernel_s, kernel_s = 0.0, decoder.runtime.seconds()
        for _ in range(tokens):
            left = state.conv, state.recurrent
            token = torch.tensor([sampler.pick(slow.next_token(token, state))])
            state.reuse(*left)
        kernel_s = decoder.runtime.seconds() - kernel_s
        copies = copy_seconds(cache, 5)
        layers = sum(
            max(copies[min(8, misses)], resident)
            for misses, resident in zip(terms.misses, terms.resident_s, strict=True)
        )
        rest = (kernel_s - terms.kernel_s) / tokens  # mixers, routers, lm_head
        sums.append(rest + layers / tokens)
        parts.append((rest, layers / tokens, sum(terms.misses) / tokens, copies[1], copies[4]))
    names = ("rest_s", "experts_s", "misses", "copy_1_s", "copy_4_s")
    return {
        "token_s": median(real),
        "sum_s": median(sums),
        "ratio": median(r / s for r, s in zip(real, sums, strict=True)),
        **{name: median(values) for name, values in zip(names, zip(*parts, strict=True), strict=True)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--slots", default="0.25,0.5")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = {}
    for share in options.slots.split(","):
        session = Session.open(options.model, residency=Residency(slots=float(share)))
        found = results[share] = measure(session, options.tokens, options.rounds)
        print(
            f"{share} of the experts in slots: {1e3 * found['token_s']:.1f} ms a token, {found['ratio']:.3f} of the sum of "
            f"its terms {1e3 * found['sum_s']:.1f} ms ({found['misses']:.1f} misses a token; one copy "
            f"{1e3 * found['copy_1_s']:.2f} ms, four {1e3 * found['copy_4_s']:.2f})",
            flush=True,
        )
        del session
    if options.json:
        options.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
