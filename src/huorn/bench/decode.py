"""Prefill and decode speed of one model: the same request several times, each in an empty state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from statistics import median

from huorn.engine.generate import Generation, GenerationStats
from huorn.engine.sampling import SamplingSettings
from huorn.engine.session import Session
from huorn.engine.tokenizer import encode
from huorn.errors import UsageError

# Real text, so that routing looks like that of real use: with random ids every expert is as likely as any other.
PROMPT = '''\
def quicksort(items):
    """Return a sorted copy of a list."""
    if len(items) < 2:
        return list(items)
    pivot, *rest = items
    smaller = [item for item in rest if item < pivot]
    larger = [item for item in rest if item >= pivot]
    return quicksort(smaller) + [pivot] + quicksort(larger)


'''


@dataclass(frozen=True)
class Speed:
    """Tokens per second over the repeats."""

    median: float
    minimum: float
    maximum: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Speed:
        """Summarise at least one value."""
        return cls(median(values), min(values), max(values))


@dataclass(frozen=True)
class DecodeBench:
    """What `huorn bench decode` measured; tokens per request and tokens per second."""

    prompt_tokens: int
    completion_tokens: int
    repeats: int
    prefill_tok_s: Speed
    decode_tok_s: Speed


def bench_decode(session: Session, prompt_tokens: int, completion_tokens: int, repeats: int) -> DecodeBench:
    """Run one request for warming up and `repeats` timed ones; greedy, and end tokens do not end it. Raises UsageError."""
    for name, value, least in (
        ("--prompt-tokens", prompt_tokens, 1), ("--max-tokens", completion_tokens, 2), ("--repeats", repeats, 1),
    ):  # fmt: skip
        if value < least:
            raise UsageError(f"{name} is {value}, but it must be {least} or more")
    if prompt_tokens + completion_tokens > session.context:
        raise UsageError(
            f"{prompt_tokens} prompt tokens and {completion_tokens} generated ones do not fit in a context of "
            f"{session.context}: lower them or raise --context"
        )
    prompt_ids = list(islice(cycle(encode(session.tokenizer, PROMPT)), prompt_tokens))
    runs = [_run(session, prompt_ids, completion_tokens) for _ in range(1 + repeats)][1:]
    return DecodeBench(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        repeats=repeats,
        prefill_tok_s=Speed.of([run.prefill_tok_s for run in runs if run.prefill_tok_s is not None]),
        decode_tok_s=Speed.of([run.decode_tok_s for run in runs if run.decode_tok_s is not None]),
    )


def _run(session: Session, prompt_ids: Sequence[int], completion_tokens: int) -> GenerationStats:
    generation = Generation(session, prompt_ids, SamplingSettings(), completion_tokens, stop_ids=frozenset())
    for _ in generation:
        pass
    return generation.stats
