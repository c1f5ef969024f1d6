"""Recording: a model reads or writes the tokens of prompts, and what every layer routes for them goes into a trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from huorn.engine.prefix import PrefixState
from huorn.engine.sampling import Sampler, SamplingSettings
from huorn.engine.session import Session
from huorn.errors import TraceError, UsageError
from huorn.model.cpu_decoder import CpuDecoder
from huorn.model.next_token import NextToken
from huorn.schedule.shapes import PREFILL_CHUNK
from huorn.trace.chunk_writer import ChunkWriter
from huorn.trace.folder import TraceFolder
from huorn.trace.layout import ROW
from huorn.trace.plan_recording import RecordingPlan
from huorn.trace.prompts import Prompt


def record(
    session: Session, folder: TraceFolder, plan: RecordingPlan, progress: Callable[[int, int], None]
) -> None:
    """Records the prompts of `plan` that are not in `folder` yet; see TraceFolder.fill.

    Raises UsageError without the native kernels; CheckpointError; TraceError when the disk refuses or a value is beyond F16, with
    the line of the prompt.
    """
    recorder = Recorder(session, plan.manifest.tokens or 0)
    one = recorder.generate if plan.manifest.mode == "decode" else recorder.read

    def write_prompt(index: int, writer: ChunkWriter) -> None:
        prompt = plan.prompts[index]
        try:
            one(prompt, index, writer)
        except OverflowError as error:
            source = plan.manifest.source.name
            raise TraceError(f"{source}, line {prompt.line}: {error}; whole chunks are kept") from error

    folder.fill(write_prompt, progress)


class Recorder:
    """One prompt after the other, with one state.

    Both ways give the same rows for the same tokens, to the bit, since what a layer computes is a function of the ids alone.
    The last token of an answer is read by neither: it gives no row and is `next_id` of the one before.
    """

    def __init__(self, session: Session, tokens: int) -> None:
        """`tokens` of an answer at most. Raises UsageError for another backend than the native kernels."""
        if not isinstance(session.decoder, CpuDecoder):
            raise UsageError("routing is recorded with the native kernels: use --backend cpu")
        self._decoder = session.decoder
        self._stop_ids = session.stop_ids
        self._tokens = tokens
        self._state: PrefixState = session.new_state()

    def read(self, prompt: Prompt, index: int, writer: ChunkWriter) -> None:
        """Teacher: the answer is given, and read in pieces."""
        ids, first = prompt.ids.tolist(), prompt.prompt_tokens
        if len(ids) - first < 2:
            return
        self._read_prompt(ids, first)
        with _tapped(self._decoder, writer):
            for start in range(first, len(ids) - 1, PREFILL_CHUNK):
                end = min(start + PREFILL_CHUNK, len(ids) - 1)
                self._state.read(ids[start:end])
                writer.add_rows(_rows(index, start - first, start, ids[start : end + 1]))

    def generate(self, prompt: Prompt, index: int, writer: ChunkWriter) -> None:
        """Decode: the likeliest token each time, until an end token or the most tokens."""
        ids, first = prompt.ids.tolist(), prompt.prompt_tokens
        sampler = Sampler(SamplingSettings(), ids)
        token = self._read_prompt(ids, first)
        assert token is not None, "a prompt has a token"
        picked = sampler.pick(token)
        with _tapped(self._decoder, writer):
            for step in range(self._tokens - 1):
                if picked in self._stop_ids:
                    return
                before, picked = picked, sampler.pick(self._state.read([picked]))
                writer.add_rows(_rows(index, step, first + step, [before, picked]))

    def _read_prompt(self, ids: Sequence[int], end: int) -> NextToken | None:
        """Reads ids [0, end) from an empty state, or from one that has read some of them, and returns what comes next."""
        token = None
        for start in range(self._state.rewind(ids[: max(1, end)]), end, PREFILL_CHUNK):
            token = self._state.read(ids[start : min(start + PREFILL_CHUNK, end)])
        return token


@dataclass(frozen=True)
class _Tap:
    """Hands what layers route to the chunk."""

    writer: ChunkWriter

    def layer(
        self,
        number: int,
        hidden: NDArray[np.float32],
        logits: NDArray[np.float32],
        ids: NDArray[np.int32],
        weights: NDArray[np.float32],
    ) -> None:
        self.writer.add_layer(number, hidden=hidden, logits=logits, ids=ids, weights=weights)


@contextmanager
def _tapped(decoder: CpuDecoder, writer: ChunkWriter) -> Iterator[None]:
    decoder.tap = _Tap(writer)
    try:
        yield
    finally:
        decoder.tap = None


def _rows(prompt: int, step: int, position: int, ids: Sequence[int]) -> NDArray[np.void]:
    """Rows of all of `ids` but the last, from `step` and `position` on."""
    rows = np.empty(len(ids) - 1, ROW)
    rows["prompt"] = prompt
    rows["step"] = np.arange(step, step + len(rows))
    rows["position"] = np.arange(position, position + len(rows))
    rows["id"], rows["next_id"] = ids[:-1], ids[1:]
    return rows
