"""A decode state together with the ids it has read, so that the next request can start where their common prefix ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from huorn.engine.forecaster import Forecaster
from huorn.model.backend import LanguageModel
from huorn.model.next_token import NextToken
from huorn.model.state import DecodeState


@dataclass(frozen=True, eq=False)
class _Point:
    """A place to come back to. A forward makes new tensors and never writes into these, so nothing is copied."""

    length: int  # ids read until here
    conv: tuple[Tensor, ...]
    recurrent: tuple[Tensor, ...]


class PrefixState:
    """Reads ids into a state and goes back to an earlier point where it can.

    The KV cache can be cut at any position, a recurrent state can not: it goes on from its end, or from the one point where it
    was kept (`mark`). The chat marks the end of the last user message, since templates rewrite the answer that follows
    (Qwen3.5's drops its thoughts). Keeping one costs 63 MB in the 35B shape.
    """

    def __init__(self, decoder: LanguageModel, context: int, forecaster: Forecaster | None = None) -> None:
        self._decoder = decoder
        self._forecaster = forecaster
        self._name = object()  # of this sequence, for the forecaster, which must not keep the state alive
        self._state = DecodeState.new(decoder.config, context, decoder.precision)
        self._ids: list[int] = []
        self._start = self._end = _Point(0, self._state.conv, self._state.recurrent)
        self.mark()

    def rewind(self, ids: Sequence[int]) -> int:
        """Go back to the longest point that is a true prefix of `ids` and return its length; 0 is the empty sequence.

        At least one id is left to read, because only reading gives a next token.
        """
        wanted = list(ids)
        for point in (self._end, self._marked):
            if point.length < len(wanted) and self._ids[: point.length] == wanted[: point.length]:
                self._go_to(point)
                return point.length
        self._go_to(self._start)
        self.mark()
        return 0

    def read(self, ids: Sequence[int]) -> NextToken:
        """Read 1 to PREFILL_CHUNK ids and return what comes after the last.

        Whatever interrupts it, Ctrl-C included, leaves the points that `rewind` knows as they were: the new end is one
        assignment, and what was written past a point counts for nothing.
        """
        if self._forecaster is not None:
            self._forecaster.forget(self._name)
        return self._read(ids)

    def decode(self, token_id: int) -> NextToken:
        """`read` of one id that was chosen after the last one read: with forecasts, copies of what it will use begin first."""
        if self._forecaster is None:
            return self._read([token_id])
        self._forecaster.before(self._name, token_id)
        token = self._read([token_id])
        self._forecaster.after(self._name, token_id)
        return token

    def _read(self, ids: Sequence[int]) -> NextToken:
        token = self._decoder.next_token(torch.tensor(ids, dtype=torch.int64), self._state)
        self._ids.extend(ids)
        before, self._end = self._end, _Point(len(self._ids), self._state.conv, self._state.recurrent)
        if before not in (self._start, self._marked):
            self._state.reuse(before.conv, before.recurrent)
        return token

    def mark(self) -> None:
        """Keep the end so far to come back to, in place of what was kept before."""
        self._marked = self._end

    def _go_to(self, point: _Point) -> None:
        if self._forecaster is not None:
            self._forecaster.forget(self._name)
        state = self._state
        state.position, state.conv, state.recurrent = point.length, point.conv, point.recurrent
        del self._ids[point.length :]
        self._end = point
