"""Prefill and decode speed of one model: requests of one size, each in an empty state."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from statistics import median

import torch

from huorn.bench.yardstick import ReadYardstick
from huorn.engine.process import peak_rss_bytes
from huorn.engine.sampling import Sampler, SamplingSettings
from huorn.engine.session import Session
from huorn.engine.stream import StreamDecoder
from huorn.engine.tokenizer import encode
from huorn.errors import UsageError
from huorn.model.cpu_decoder import CpuDecoder, Sequences
from huorn.model.state import DecodeState
from huorn.model.two_pass_head import TwoPassHead
from huorn.schedule.shapes import PREFILL_CHUNK

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
class Request:
    """What is run: tokens of prompt, tokens to generate (exactly), timed repeats, sequences that decode together."""

    prompt_tokens: int
    completion_tokens: int
    repeats: int
    sequences: int = 1
    yardstick: bool = True  # also measure what RAM gives, in 4 GiB of its own

    def check(self, context: int) -> None:
        """UsageError when a number is too small or the context too short."""
        for name, value, least in (
            ("--prompt-tokens", self.prompt_tokens, 1), ("--max-tokens", self.completion_tokens, 2),
            ("--repeats", self.repeats, 1), ("--sequences", self.sequences, 1),
        ):  # fmt: skip
            if value < least:
                raise UsageError(f"{name} is {value}, but it must be {least} or more")
        if self.prompt_tokens + self.completion_tokens > context:
            raise UsageError(
                f"{self.prompt_tokens} prompt tokens and {self.completion_tokens} generated ones do not fit in a context of "
                f"{context}: lower them or raise --context"
            )


@dataclass(frozen=True)
class DecodeBench:
    """What `huorn bench decode` measured: medians over the repeats, with all values behind them.

    Speeds in tokens per second, of all sequences together. What follows needs the native kernels: bytes of weights and state
    that the kernels counted per decode step, what a native loop read per second between the runs, the share of it that
    decoding reached, and time per decode step outside the kernels. The last three need slots: the share of looked up experts
    that were in one, bytes read from disk and seconds waited for them per decode step.
    """

    prompt_tokens: int
    completion_tokens: int
    repeats: int
    sequences: int
    prefill_tok_s: float
    decode_tok_s: float
    prefill_tok_s_all: tuple[float, ...]
    decode_tok_s_all: tuple[float, ...]
    peak_rss_bytes: int  # before the yardstick took its block
    isa: str | None
    ram_bytes_per_token: float | None
    read_bandwidth_bytes_s: float | None
    limit_fraction: float | None
    python_s_per_token: float | None
    hit_rate: float | None
    disk_bytes_per_token: float | None
    demand_wait_s_per_token: float | None
    rescored_rows_per_token: float | None  # of a two-pass lm_head


@dataclass(frozen=True)
class _Run:
    """One request: seconds of prefill and of the decode steps; per step what kernels read, Python spent, and slots did."""

    prefill_s: float
    decode_s: float
    step_bytes: float
    step_python_s: float
    hit_rate: float
    step_disk_bytes: float
    step_wait_s: float


@dataclass(frozen=True)
class _Counts:
    """Counters at one moment."""

    read_bytes: int = 0
    kernel_s: float = 0.0
    lookups: int = 0
    hits: int = 0
    disk_bytes: int = 0
    wait_s: float = 0.0

    @classmethod
    def now(cls, session: Session) -> _Counts:
        """Those of a session; zeros for what it does not have."""
        runtime = session.decoder.runtime if isinstance(session.decoder, CpuDecoder) else None
        read, kernel_s = (0, 0.0) if runtime is None else (sum(runtime.counters()), runtime.seconds())
        if session.cache is None:
            return cls(read, kernel_s)
        counts = session.cache.counts
        return cls(
            read, kernel_s, counts.lookups, counts.hits, session.cache.reader.bytes_read, counts.wait_s
        )


def bench_decode(session: Session, request: Request) -> DecodeBench:
    """Run one request for warming up and the timed ones; greedy, and end tokens do not end it. Raises UsageError."""
    request.check(session.context)
    decoder = session.decoder
    if request.sequences > 1 and not isinstance(decoder, CpuDecoder):
        raise UsageError("--sequences needs the native kernels: use --backend cpu")
    text = encode(session.tokenizer, PROMPT)
    runtime = decoder.runtime if isinstance(decoder, CpuDecoder) else None
    _run(session, _prompt(text, request, 0), request)
    peak = peak_rss_bytes()
    yardstick = None if runtime is None or not request.yardstick else ReadYardstick(runtime)
    bandwidths, runs = list[float](), list[_Run]()
    for number in range(1, request.repeats + 1):
        if yardstick is not None:
            bandwidths.append(yardstick.read_bytes_s())
        runs.append(_run(session, _prompt(text, request, number), request))
    return _summary(request, runs, bandwidths, peak, session)


def _prompt(text: Sequence[int], request: Request, number: int) -> list[int]:
    """The prompt of run `number`: the text over and over from another place each time, since a cache of experts that had seen the
    same request before would know what is to come."""
    start = 29 * number % len(text)
    return list(islice(cycle(text), start, start + request.prompt_tokens))


def _summary(
    request: Request,
    runs: Sequence[_Run],
    bandwidths: Sequence[float],
    peak: int,
    session: Session,
) -> DecodeBench:
    decoder, slots = session.decoder, session.cache is not None
    runtime = decoder.runtime if isinstance(decoder, CpuDecoder) else None
    head = decoder.head if isinstance(decoder, CpuDecoder) else None
    steps = (request.completion_tokens - 1) * request.sequences
    prefill = tuple(request.prompt_tokens * request.sequences / run.prefill_s for run in runs)
    decode = tuple(steps / run.decode_s for run in runs)
    native = runtime is not None
    step_bytes = median(run.step_bytes for run in runs)
    bandwidth = median(bandwidths) if bandwidths else None
    steps_s = median(decode) / request.sequences
    return DecodeBench(
        prompt_tokens=request.prompt_tokens,
        completion_tokens=request.completion_tokens,
        repeats=request.repeats,
        sequences=request.sequences,
        prefill_tok_s=median(prefill),
        decode_tok_s=median(decode),
        prefill_tok_s_all=prefill,
        decode_tok_s_all=decode,
        peak_rss_bytes=peak,
        isa=None if runtime is None else runtime.isa,
        ram_bytes_per_token=step_bytes if native else None,
        read_bandwidth_bytes_s=bandwidth,
        limit_fraction=None if bandwidth is None else step_bytes * steps_s / bandwidth,
        python_s_per_token=median(run.step_python_s for run in runs) if native else None,
        hit_rate=median(run.hit_rate for run in runs) if slots else None,
        disk_bytes_per_token=median(run.step_disk_bytes for run in runs) if slots else None,
        demand_wait_s_per_token=median(run.step_wait_s for run in runs) if slots else None,
        rescored_rows_per_token=head.counts.rescored_rows_per_token
        if isinstance(head, TwoPassHead)
        else None,
    )


def _run(session: Session, prompt_ids: Sequence[int], request: Request) -> _Run:
    if request.sequences > 1:
        return _run_together(session, prompt_ids, request)
    state, sampler, text = (
        session.new_state(),
        Sampler(SamplingSettings(), prompt_ids),
        StreamDecoder(session.tokenizer),
    )
    start = time.perf_counter()
    for first in range(0, len(prompt_ids), PREFILL_CHUNK):
        token = state.read(prompt_ids[first : first + PREFILL_CHUNK])
    token_id = sampler.pick(token)
    between, before = time.perf_counter(), _Counts.now(session)
    for _ in range(request.completion_tokens - 1):
        text.push(token_id)
        token_id = sampler.pick(state.decode(token_id))
    end, after = time.perf_counter(), _Counts.now(session)
    return _between(start, between, end, before, after, request.completion_tokens - 1)


def _run_together(session: Session, prompt_ids: Sequence[int], request: Request) -> _Run:
    """Sequences that start at different places of the same prompt, so that they do not all want the same experts."""
    decoder = session.decoder
    assert isinstance(decoder, CpuDecoder)
    count = len(prompt_ids)
    prompts = [
        torch.tensor([prompt_ids[(place + 7 * number) % count] for place in range(count)])
        for number in range(request.sequences)
    ]
    states = [DecodeState.new(session.config, session.context, decoder.precision) for _ in prompts]
    greedy = Sampler(SamplingSettings(), [])
    start = time.perf_counter()
    last = []
    for ids, state in zip(prompts, states, strict=True):
        for part in ids.split(PREFILL_CHUNK):
            token = decoder.next_token(part, state)
        last.append(torch.tensor([greedy.pick(token)]))
    between, before = time.perf_counter(), _Counts.now(session)
    for _ in range(request.completion_tokens - 1):
        left = [(state.conv, state.recurrent) for state in states]
        last = [torch.tensor([greedy.pick(token)]) for token in decoder.next_tokens(Sequences(last, states))]
        for state, (conv, recurrent) in zip(states, left, strict=True):
            state.reuse(conv, recurrent)
    end, after = time.perf_counter(), _Counts.now(session)
    return _between(start, between, end, before, after, request.completion_tokens - 1)


def _between(start: float, between: float, end: float, before: _Counts, after: _Counts, steps: int) -> _Run:
    lookups = after.lookups - before.lookups
    return _Run(
        prefill_s=between - start,
        decode_s=end - between,
        step_bytes=(after.read_bytes - before.read_bytes) / steps,
        step_python_s=(end - between - (after.kernel_s - before.kernel_s) - (after.wait_s - before.wait_s))
        / steps,
        hit_rate=(after.hits - before.hits) / lookups if lookups else 1.0,
        step_disk_bytes=(after.disk_bytes - before.disk_bytes) / steps,
        step_wait_s=(after.wait_s - before.wait_s) / steps,
    )
