"""The two ways to compute a model, behind one interface."""

from __future__ import annotations

from typing import Literal, Protocol

from torch import Tensor

from huorn.checkpoint.config import ModelConfig
from huorn.model.next_token import NextToken
from huorn.model.precision import Precision
from huorn.model.state import DecodeState
from huorn.model.tables import LmHead

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
