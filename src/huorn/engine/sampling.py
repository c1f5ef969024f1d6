"""From one row of logits to one token id.

The order of operations, always the same:

1. **repetition penalty** r on every id seen in the prompt or generated: l / r when l > 0, else l * r (Keskar et al. 2019, CTRL);
2. **presence** p and **frequency** f penalties on generated ids only: l - p - f * count (the OpenAI API's formula);
3. **greedy** for temperature 0: the largest logit, and nothing of what follows;
4. **top-k**: the k largest logits stay, and are divided by the **temperature**;
5. **top-p**: softmax over what stayed, then the shortest run of largest probabilities whose sum reaches p stays;
6. **min-p**: probabilities of at least min_p times the largest stay;
7. **draw**: what stayed is renormalised and laid out by ascending id; one uniform number picks.

Every tie (greedy, at the k-th place, at the edge of the nucleus) is broken by the lower id. Everything is computed in F64: with
248,320 ids an F32 running sum loses about 1e-5 of probability, enough to move a draw.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from huorn.errors import HuornError, UsageError
from huorn.model.next_token import Adjustment, Candidates, FullLogits, NextToken


@dataclass(frozen=True)
class SamplingSettings:
    """How to pick a token. The defaults are greedy; `seed` None draws a fresh seed for each request."""

    temperature: float = 0.0
    top_k: int = 0  # 0: no limit
    top_p: float = 1.0  # 1: no limit
    min_p: float = 0.0  # 0: no limit
    repetition_penalty: float = 1.0  # 1: none
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None

    def __post_init__(self) -> None:
        """Raise UsageError that names the first setting outside its range (NaN is outside every range).

        Penalties that mean anything lie far inside theirs; beyond, logits would overflow to infinity and then to NaN.
        """
        _require(
            0.0 <= self.temperature < math.inf,
            "temperature",
            self.temperature,
            "0 (greedy) or a finite positive number",
        )
        _require(self.top_k >= 0, "top-k", self.top_k, "0 (no limit) or a positive whole number")
        _require(0.0 < self.top_p <= 1.0, "top-p", self.top_p, "above 0 and at most 1 (no limit)")
        _require(0.0 <= self.min_p <= 1.0, "min-p", self.min_p, "from 0 (no limit) to 1")
        _require(
            1e-6 <= self.repetition_penalty <= 1e6,
            "repetition-penalty",
            self.repetition_penalty,
            "from 0.000001 to 1000000 (1 means none)",
        )
        for name, value in (
            ("presence-penalty", self.presence_penalty),
            ("frequency-penalty", self.frequency_penalty),
        ):
            _require(-1e6 <= value <= 1e6, name, value, "from -1000000 to 1000000 (0 means none)")
        _require(self.seed is None or self.seed >= 0, "seed", self.seed, "0 or a positive whole number")


def _require(holds: bool, name: str, value: object, expected: str) -> None:
    if not holds:
        raise UsageError(f"--{name} is {value}, but it must be {expected}")


class Sampler:
    """Picks the tokens of one request and remembers them for the penalties."""

    def __init__(self, settings: SamplingSettings, prompt_ids: Sequence[int]) -> None:
        self._settings = settings
        # Greedy without penalties needs no F64 copy of the logits: 0.1 instead of 1.5 ms at 248,320 ids.
        self._plain = settings.temperature == 0.0 and (
            settings.repetition_penalty, settings.presence_penalty, settings.frequency_penalty
        ) == (1.0, 0.0, 0.0)  # fmt: skip
        self._seen = set(prompt_ids)
        self._generated: Counter[int] = Counter()
        # Python's generator: its random() is promised to give the same numbers on every version and machine.
        self._random = random.Random(settings.seed)

    def pick(self, logits: Tensor | NextToken) -> int:
        """Return the next token id, of which all logits [V] f32 or a NextToken are known, and count it as generated.

        Raises HuornError when the logits hold NaN or +inf, or nothing above -inf; CheckpointError as NextToken does.
        """
        token = FullLogits.of(logits) if isinstance(logits, Tensor) else logits
        adjustment = None if self._plain else self._adjustment()
        wanted = 1 if self._settings.temperature == 0.0 else self._settings.top_k
        found = token.largest(wanted, adjustment) if wanted else Candidates(None, token.full())
        if self._plain:
            scores = found.logits.numpy()  # out of the caches, each operation of torch costs 0.1 ms
            place = int(scores.argmax())  # the first of equal maxima, and a NaN before everything
            _check_finite(float(scores[place]))
        else:
            wide = found.logits.to(torch.float64, copy=True)
            _check_finite(float(wide.max()))  # max() propagates NaN
            if adjustment is not None:
                adjustment.apply(wide, found.ids)
            place = self._choose(wide)
        token_id = place if found.ids is None else int(found.ids[place])
        self._seen.add(token_id)
        self._generated[token_id] += 1
        return token_id

    def _adjustment(self) -> Adjustment | None:
        """Steps 1 and 2; None where they change nothing."""
        settings, counts = self._settings, self._generated
        per_token = settings.presence_penalty != 0.0 or settings.frequency_penalty != 0.0
        ids = sorted(self._seen if settings.repetition_penalty != 1.0 else counts.keys() if per_token else ())
        if not ids:
            return None
        minus = torch.zeros(len(ids), dtype=torch.float64)
        if per_token:
            generated = torch.tensor([counts[token_id] for token_id in ids], dtype=torch.float64)
            penalties = settings.presence_penalty + settings.frequency_penalty * generated
            minus = torch.where(generated > 0, penalties, minus)
        return Adjustment(torch.tensor(ids), settings.repetition_penalty, minus)

    def _choose(self, scores: Tensor) -> int:
        """The place of what steps 3 to 7 pick of `scores` [N] f64, which lie by ascending id."""
        settings = self._settings
        if settings.temperature == 0.0:
            return int(torch.argmax(scores))  # the first of equal maxima
        ids = keep_top_k(scores, settings.top_k)
        # Subtracting the maximum first keeps a tiny temperature from overflowing: the best id stays at exactly 0.
        scores = (scores[ids] - scores.max()) / settings.temperature
        weights = torch.exp(scores)  # softmax without its denominator; the largest is 1
        kept = keep_top_p(weights, settings.top_p)
        ids, weights = ids[kept], weights[kept]
        kept = (weights >= settings.min_p) & (weights > 0.0)
        ids, weights = ids[kept], weights[kept]
        running = torch.cumsum(weights, dim=0)
        drawn = self._random.random() * float(running[-1])
        place = int(torch.searchsorted(running, drawn, right=True))
        return int(ids[min(place, ids.numel() - 1)])  # the product can round up to the whole sum


def _check_finite(largest: float) -> None:
    if not math.isfinite(largest):
        raise HuornError(
            f"the model's largest logit is {largest}, so no token can be picked: the checkpoint is damaged, try huorn verify"
        )


def keep_top_k(scores: Tensor, k: int) -> Tensor:
    """Return the ids of the k largest `scores` [V], ascending; ties at the k-th place keep the lower ids. k = 0 keeps all."""
    if k == 0 or k >= scores.numel():
        return torch.arange(scores.numel())
    edge = torch.topk(scores, k).values[-1]
    above = torch.nonzero(scores > edge).flatten()
    level = torch.nonzero(scores == edge).flatten()[: k - above.numel()]
    return torch.sort(torch.cat([above, level])).values


def keep_top_p(weights: Tensor, p: float) -> Tensor:
    """Return the places, ascending, of the shortest run of largest `weights` [N] whose share of the sum reaches p.

    Ties keep the lower place. A weight is kept when the larger ones before it sum to less than p of the total, so one always is.
    """
    if p >= 1.0:
        return torch.arange(weights.numel())
    target = p * weights.sum()
    # Weights under (1 - p) / N of the total sum to less than 1 - p, so they lie outside the nucleus: leaving them out of the
    # sort turns 20 ms into 1 ms at 248,320 ids. Half of it, so that rounding can not cut into the nucleus.
    candidates = torch.nonzero(weights > 0.5 * (1.0 - p) / weights.numel() * weights.sum()).flatten()
    ordered, order = torch.sort(weights[candidates], descending=True, stable=True)
    before = torch.cat([torch.zeros(1, dtype=ordered.dtype), torch.cumsum(ordered, dim=0)[:-1]])
    return torch.sort(candidates[order[before < target]]).values
