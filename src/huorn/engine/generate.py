"""The decode loop of one request: read the prompt, then pick, emit and read one token at a time."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from huorn.engine.prefix import PrefixState
from huorn.engine.process import peak_rss_bytes
from huorn.engine.sampling import Sampler, SamplingSettings
from huorn.engine.session import Session
from huorn.engine.stream import StopStrings, StreamDecoder
from huorn.errors import UsageError
from huorn.model.next_token import NextToken
from huorn.schedule.shapes import PREFILL_CHUNK

# stop: an end token or a stop string; length: max_tokens or the context is used up; cancelled: asked to stop.
FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True)
class GenerationStats:
    """What one request did. Speeds are None when nothing was timed: no token read, or fewer than two generated."""

    text: str
    prompt_tokens: int
    reused_tokens: int  # of the prompt: found in the state, not read again
    completion_tokens: int  # an end token included
    prefill_tok_s: float | None  # tokens read over the time until their logits
    decode_tok_s: float | None  # tokens after the first over the time since the first
    ttft_s: float | None  # from `started` to the first token
    peak_rss_bytes: int
    finish_reason: FinishReason


class Generation:
    """One request. Iterate it for pieces of text; `stats` are complete when the iteration has ended."""

    def __init__(
        self,
        session: Session,
        prompt_ids: Sequence[int],
        sampling: SamplingSettings,
        max_tokens: int,
        stop: Sequence[str] = (),
        *,
        state: PrefixState | None = None,
        mark_at: int | None = None,
        stop_ids: frozenset[int] | None = None,
        started: float | None = None,
    ) -> None:
        """Check the request; nothing is computed yet.

        `state` is reused as far as it fits the prompt, and is marked (see PrefixState) once the first `mark_at` tokens of the
        prompt are read. `stop_ids` None are the model's own end tokens. `ttft_s` counts from `started`, a time.monotonic()
        reading, by default now. Raises UsageError.
        """
        check_limits(max_tokens, stop)
        _check_request(session, prompt_ids)
        self._prompt_ids = list(prompt_ids)
        self._limit = min(max_tokens, session.context - len(prompt_ids))
        self._sampler = Sampler(sampling, prompt_ids)
        self._decoder = StreamDecoder(session.tokenizer)
        self._stop = StopStrings(stop)
        self._stop_ids = session.stop_ids if stop_ids is None else stop_ids
        self._state = state or session.new_state()
        self._mark_at = mark_at
        self._started = time.monotonic() if started is None else started
        self._cancelled = False
        self._finish_reason: FinishReason = "cancelled"  # until it ends by itself
        self._text: list[str] = []
        self._read_tokens = 0
        self._prefill_s = 0.0
        self._pick_times: list[float] = []

    def __iter__(self) -> Iterator[str]:
        """Yield non-empty pieces of text as they become certain; joined they are `stats.text`."""
        for token_id in self._tokens():
            piece, stopped = self._stop.push(self._decoder.push(token_id))
            yield from self._emit(piece)
            if stopped:
                self._finish_reason = "stop"
                return
        piece, _ = self._stop.push(self._decoder.flush())
        yield from self._emit(piece + self._stop.flush())

    def cancel(self) -> None:
        """Stop before the next token; safe to call from a signal handler or another thread."""
        self._cancelled = True

    @property
    def stats(self) -> GenerationStats:
        """What has been done so far."""
        times = self._pick_times
        decode_s = times[-1] - times[0] if len(times) > 1 else 0.0
        return GenerationStats(
            text="".join(self._text),
            prompt_tokens=len(self._prompt_ids),
            reused_tokens=len(self._prompt_ids) - self._read_tokens,
            completion_tokens=len(times),
            prefill_tok_s=self._read_tokens / self._prefill_s if self._prefill_s else None,
            decode_tok_s=(len(times) - 1) / decode_s if decode_s else None,
            ttft_s=times[0] - self._started if times else None,
            peak_rss_bytes=peak_rss_bytes(),
            finish_reason=self._finish_reason,
        )

    def _tokens(self) -> Iterator[int]:
        """Yield picked ids up to the limit, an end token or `cancel`, and set the finish reason."""
        begin = time.monotonic()
        token = self._prefill(begin)
        while token is not None and len(self._pick_times) < self._limit:
            token_id = self._sampler.pick(token)
            self._pick_times.append(time.monotonic())
            if len(self._pick_times) == 1:  # logits are computed when they are asked for
                self._prefill_s = self._pick_times[0] - begin
            if token_id in self._stop_ids:
                self._finish_reason = "stop"
                return
            yield token_id
            if self._cancelled:
                return
            if len(self._pick_times) < self._limit:  # the last token's logits would pick nothing
                token = self._state.decode(token_id)
        if token is not None:
            self._finish_reason = "length"

    def _prefill(self, begin: float) -> NextToken | None:
        """Read the prompt, since `begin`, and return what comes after it; None when cancelled on the way."""
        start = self._state.rewind(self._prompt_ids)
        token = None
        for first, end in _chunks(start, self._mark_at, len(self._prompt_ids)):
            if self._cancelled:
                return None
            token = self._state.read(self._prompt_ids[first:end])
            self._read_tokens += end - first
            self._prefill_s = time.monotonic() - begin
            if end == self._mark_at:
                self._state.mark()
        return token

    def _emit(self, piece: str) -> Iterator[str]:
        if piece:
            self._text.append(piece)
            yield piece


def _chunks(start: int, cut: int | None, end: int) -> Iterator[tuple[int, int]]:
    """Yield (first, end) of chunks of at most PREFILL_CHUNK from `start` to `end`, none across `cut`."""
    while start < end:
        limits = [start + PREFILL_CHUNK, end] + ([cut] if cut is not None and cut > start else [])
        yield start, min(limits)
        start = min(limits)


def check_limits(max_tokens: int, stop: Sequence[str]) -> None:
    """Raise UsageError when a request with these limits would be refused whatever its prompt: before a model is loaded."""
    if max_tokens < 0:
        raise UsageError(f"--max-tokens is {max_tokens}, but it must be 0 or more")
    StopStrings(stop)


def _check_request(session: Session, prompt_ids: Sequence[int]) -> None:
    if not prompt_ids:
        raise UsageError("the prompt is empty, but the model needs at least one token to go on from")
    if len(prompt_ids) >= session.context:
        longest = session.config.max_position_embeddings
        raise UsageError(
            f"the prompt has {len(prompt_ids)} tokens, which leaves no room in a context of {session.context}: "
            f"shorten it or raise --context (this model allows up to {longest})"
        )
