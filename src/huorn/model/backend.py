"""The two ways to compute a model, behind one interface."""

from __future__ import annotations

from typing import Literal, Protocol

from torch import Tensor

from huorn import _native
from huorn.checkpoint.config import ModelConfig
from huorn.checkpoint.reader import Checkpoint
from huorn.kernels import isa
from huorn.model.cpu_load import load_cpu_decoder
from huorn.model.load import load_decoder
from huorn.model.next_token import NextToken
from huorn.model.precision import Precision
from huorn.model.state import DecodeState
from huorn.model.tables import LmHead, Tables

Backend = Literal["cpu", "reference"]


class LanguageModel(Protocol):
    """What the engine asks of a decoder."""

    @property
    def config(self) -> ModelConfig:
        """Shape of the model."""
        ...

    @property
    def precision(self) -> Precision:
        """What operands are rounded to."""
        ...

    @property
    def lm_head_kind(self) -> LmHead:
        """How next tokens are computed."""
        ...

    def forward(self, token_ids: Tensor, state: DecodeState, all_logits: bool = False) -> Tensor:
        """Appends int64 [T] to the sequence in `state` -> logits f32 [1, V], or [T, V] with all_logits."""
        ...

    def next_token(self, token_ids: Tensor, state: DecodeState) -> NextToken:
        """Appends int64 [T] to the sequence in `state` -> the token after the last one; where the backend can,
        only what is asked for is computed."""
        ...


def open_decoder(
    checkpoint: Checkpoint,
    precision: Precision,
    backend: Backend,
    threads: int,
    available_bytes: int,
    lm_head: LmHead,
) -> LanguageModel:
    """The decoder of a checkpoint: `cpu` on native kernels (logits depend on the token ids alone, to the bit), `reference` in
    PyTorch (the oracle, which takes every head in full). `available_bytes` is what weights may take. Raises CheckpointError,
    UsageError."""
    if backend == "reference":
        return load_decoder(checkpoint, precision)
    runtime = _native.Runtime(threads, isa.chosen())
    tables = Tables.of(checkpoint, precision, lm_head)
    return load_cpu_decoder(checkpoint, precision, runtime, available_bytes, tables)
