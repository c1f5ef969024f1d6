"""How alike consecutive tokens of a model route, measured on decodes of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields

import numpy as np
import torch
from numpy.typing import NDArray

from huorn.engine.sampling import Sampler, SamplingSettings
from huorn.engine.session import Session
from huorn.errors import UsageError
from huorn.model.cpu_decoder import CpuDecoder, Sequences
from huorn.model.state import DecodeState
from huorn.schedule.plan import Plan
from huorn.trace.routing_stats import chance_hottest_quarter, hottest_quarter, overlap

# Drawn at random, as context: the memory of a layer is not full at the first tokens. Not counted.
PROMPT_TOKENS = 24
# (sequences, tokens of each) that are decoded and counted: 15 s where the experts are in RAM; where they are read from disk,
# a token may take seconds, and so do the experts of each further sequence.
IN_RAM, FROM_DISK = (12, 48), (1, 20)


@dataclass(frozen=True)
class RoutingMeasurement:
    """Over the decoded tokens of all sequences; see huorn.trace.routing_stats for the figures."""

    overlap: float
    hottest_quarter: float
    chance_hottest_quarter: float  # had as many tokens routed uniformly
    sequences: int
    tokens: int  # of each sequence
    different_tokens: (
        int  # of all that were decoded: few would mean that a decode repeats itself, and so its routing
    )


def measure_routing(session: Session, progress: Callable[[int, int], None]) -> RoutingMeasurement:
    """Decode with temperature 1 and fixed seeds from random prompts and look at what the routers choose.

    A greedy decode of random weights may end in a cycle, whose tokens route alike for that reason alone. progress(steps done,
    steps in all) is called after every step. Needs the cpu backend. Raises UsageError, CheckpointError.
    """
    decoder = session.decoder
    if not isinstance(decoder, CpuDecoder):
        raise UsageError("routing is measured with the native kernels: use --backend cpu")
    observed = _Observed.of(decoder)
    count, tokens = IN_RAM if decoder.experts.resident else FROM_DISK
    drawn, ids = _decode(observed, count, tokens, progress)
    experts, together = decoder.config.num_experts, np.concatenate(list(ids))
    return RoutingMeasurement(
        overlap=float(np.mean([overlap(sequence) for sequence in ids])),
        hottest_quarter=hottest_quarter(together, experts),
        chance_hottest_quarter=chance_hottest_quarter(len(together), experts, ids.shape[-1]),
        sequences=count,
        tokens=tokens,
        different_tokens=len(set(drawn)),
    )


def _decode(
    decoder: _Observed, count: int, tokens: int, progress: Callable[[int, int], None]
) -> tuple[list[int], NDArray[np.int32]]:
    """(all token ids decoded, their experts int32 [count, tokens, L, K])."""
    config, generator = decoder.config, torch.Generator().manual_seed(0)
    prompts = torch.randint(config.vocab_size, (count, PROMPT_TOKENS), generator=generator)
    states = [DecodeState.new(config, PROMPT_TOKENS + tokens, decoder.precision) for _ in range(count)]
    samplers = [Sampler(SamplingSettings(temperature=1.0, seed=number), []) for number in range(count)]
    progress(0, tokens)
    logits = decoder.forward_batch(Sequences(list(prompts), states))
    drawn, steps = list[int](), list[NDArray[np.int32]]()
    for step in range(tokens):
        picked = [sampler.pick(row[0]) for sampler, row in zip(samplers, logits, strict=True)]
        drawn += picked
        decoder.chosen.clear()
        left = [(state.conv, state.recurrent) for state in states]
        logits = decoder.forward_batch(Sequences([torch.tensor([token]) for token in picked], states))
        for state, (conv, recurrent) in zip(states, left, strict=True):
            state.reuse(conv, recurrent)
        steps.append(np.stack(decoder.chosen, axis=1))
        progress(step + 1, tokens)
    return drawn, np.stack(steps, axis=1)


@dataclass(eq=False)
class _Observed(CpuDecoder):
    """A decoder that notes in `chosen` the experts int32 [T, K] of each layer call."""

    chosen: list[NDArray[np.int32]] = field(default_factory=list, init=False)

    @classmethod
    def of(cls, decoder: CpuDecoder) -> _Observed:
        """The same model, which makes its plans in Python."""
        parts = {each.name: getattr(decoder, each.name) for each in fields(decoder) if each.init}
        return cls(**(parts | {"quick_pairs": False}))

    def plan(self, ids: NDArray[np.int32]) -> Plan:
        """The plan, after a note of what it is for."""
        self.chosen.append(ids.copy())
        return super().plan(ids)
