"""What a head must beat: forecasts from routing and token ids alone, on the same rows, fitted on training rows."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from huorn.predictor.bank_files.reference_scorer import multi_hot
from huorn.predictor.dataset import HeadRows

# Rows of a token id that weigh as much as what all tokens do.
_PRIOR_ROWS = 4.0
# Less than any difference of averages or of counts that matters: it orders what is equal.
_TIE = 1e-4

Baseline = Callable[[Tensor], Tensor]  # rows i64 [R] -> scores f32 [R, E]

# Of equal lead: all is known when token t has been decoded and t+1 sampled.
EQUAL_LEAD = ("repeat", "ema", "popularity", "count_table")
# The router of layer L on the hidden state of layer L - 1 at token t+1: known one layer ahead only.
LESS_LEAD = ("next_layer_gate",)


def baselines(train: HeadRows, rows: HeadRows, router: tuple[Tensor, Tensor]) -> dict[str, Baseline]:
    """The baselines for `rows`, those that what was recorded allows. `router` is the fit of the layer's router, weight [E, D] and
    bias [E]."""
    usable = train.usable
    next_hot = multi_hot(train.routed_next(usable), train.experts)
    popularity = next_hot.mean(0)
    found: dict[str, Baseline] = {
        "repeat": lambda at: multi_hot(rows.ids[at, -1], rows.experts) + _TIE * popularity,
        "ema": lambda at: rows.prior[at] + _TIE * popularity,
        "popularity": lambda at: popularity.expand(len(at), -1),
    }
    if int(train.next_token.max()) >= 0:
        found["count_table"] = _count_table(train.next_token[usable], next_hot, popularity, rows)
    if rows.hidden.shape[2] and rows.logits.shape[2] and len(rows.hidden_layers) == 2:
        found["next_layer_gate"] = lambda at: F.linear(rows.hidden[at + 1, 0].float(), *router)
    return found


def _count_table(tokens: Tensor, next_hot: Tensor, popularity: Tensor, rows: HeadRows) -> Baseline:
    """P(expert | id of token t+1), counted."""
    size = int(max(tokens.max(), rows.next_token.max())) + 1
    counts = torch.bincount(tokens, minlength=size).float()
    used = torch.zeros(size, next_hot.shape[1]).index_add_(0, tokens, next_hot)
    table = (used + _PRIOR_ROWS * popularity) / (counts[:, None] + _PRIOR_ROWS)
    return lambda at: table[rows.next_token[at]]
