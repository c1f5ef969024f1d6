"""Forecasts in the decode loop: from what a token left behind and the next id to what the cache does for that one."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from huorn.engine.forecast_control import ForecastControl
from huorn.errors import CheckpointError
from huorn.experts.cache import ExpertCache
from huorn.experts.foresight import Forecast
from huorn.model.cpu_decoder import CpuDecoder, KeptRows
from huorn.predictor.native_features import NativeFeatures
from huorn.predictor.native_scorer import NativeScorer
from huorn.predictor.served_bank import ServedBank, TokenRows


@dataclass(eq=False)
class _Sequence:
    """What heads see of earlier tokens: decode steps so far, experts of two tokens i32 [L, K], the moving average f32 [H, E]."""

    prior: Tensor
    step: int = -1
    token: int = 0
    routed: Tensor | None = None
    previous: Tensor | None = None


class Forecaster:
    """One sequence at a time: `before` and `after` each decode step of it, `forget` at anything else.

    A forecast exists from the second decode step on: what the first one's routers read and made is its input. It moves bytes
    alone.
    """

    def __init__(
        self, bank: ServedBank, decoder: CpuDecoder, cache: ExpertCache, control: ForecastControl
    ) -> None:
        """`control` decides what a forecast may move; the heads stay where `bank` has them."""
        self.control = control
        self._decoder, self._cache = decoder, cache
        self._features = NativeFeatures(bank.config, decoder.runtime)
        self._scorer = NativeScorer(bank.tensors, decoder.runtime)
        self._rows, self._beta = TokenRows(bank.token_table), bank.config.features.ema_beta
        self._heads = np.array(bank.config.heads.layers)
        shape = len(self._heads), len(bank.config.heads.horizons), decoder.config.num_experts
        self._scores, self._probabilities = torch.empty(2, *shape)
        self._every = np.full((len(decoder.layers), *shape[1:]), np.nan, dtype=np.float32)
        self._owner: object = None
        self._sequence = self._new_sequence()
        self.forecast: Forecast | None = None

    def before(self, owner: object, next_id: int) -> None:
        """The next token of `owner`'s sequence is chosen and not yet read: forecasts what it will use."""
        start = time.perf_counter()
        self.forecast = None
        if not self.control.follows:
            self.forget(self._owner)
            return
        if owner is self._owner and self.control.wants_forecast:
            kept = self._decoder.kept_rows()
            self.forecast = None if kept is None else self._score(kept, next_id)
        used = self.forecast if self.control.uses_forecasts else None
        self._cache.foresee(used, 0 if used is None else self.control.most)
        self.control.spend(time.perf_counter() - start)

    def after(self, owner: object, token_id: int) -> None:
        """That token has been read."""
        start = time.perf_counter()
        kept = self._decoder.kept_rows() if self.control.follows else None
        if kept is None:
            self.forget(owner)
            self.control.ended(start)
            return
        if owner is not self._owner:
            self._owner, self._sequence = owner, self._new_sequence()
        own = self._sequence
        own.previous, own.routed = own.routed, kept.ids[:, 0].clone()
        own.step, own.token = own.step + 1, token_id
        came = own.routed.numpy()[self._heads]
        prior = own.prior.numpy()  # update_prior of reference_scorer.py, to the bit
        prior *= np.float32(self._beta)
        prior[np.arange(len(prior))[:, None], came] += np.float32(1.0 - self._beta)
        said = None if self.forecast is None else self._probabilities[:, 0].numpy()
        self.control.ended(
            start, said, None if own.previous is None else own.previous.numpy()[self._heads], came
        )
        self.control.spend(time.perf_counter() - start)

    def forget(self, owner: object) -> None:
        """What `owner` reads next does not follow its last decode step."""
        if owner is not None and owner is self._owner:
            self._owner = None
            self._cache.foresee(None)

    def _new_sequence(self) -> _Sequence:
        return _Sequence(torch.zeros(len(self._heads), self._decoder.config.num_experts))

    def _score(self, kept: KeptRows, next_id: int) -> Forecast | None:
        """f32 [layers, 3, experts], NaN where there is no head; None where features have no value. Valid until the next."""
        own = self._sequence
        try:
            rows = self._rows.of(own.token), self._rows.of(next_id)
        except CheckpointError as error:  # a bank moves bytes only: what is wrong with it ends no request
            self.control.give_up(f"the bank can not be read ({error})")
            return None
        if own.routed is None or rows[0] is None or rows[1] is None:
            return None
        self._features.assemble(
            kept.hidden, kept.logits, own.routed, own.previous, own.prior, own.step, (rows[0], rows[1])
        )
        self._scorer.score_into(self._features.x, self._features.base, 0, self._scores, self._probabilities)
        found = self._probabilities.numpy()
        if not np.isfinite(found).all():  # a router read a number beyond F16
            return None
        self._every[self._heads] = found
        return self._every
