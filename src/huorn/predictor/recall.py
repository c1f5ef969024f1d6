"""recall@K: the share of a token's routed experts that are among the K of highest score."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

KS = (8, 12, 16, 24, 32, 48, 64)


def hits_at(scores: Tensor, routed: Tensor, ks: Sequence[int] = KS) -> Tensor:
    """scores f32 [R, E], routed i64 [R, top_k] -> f32 [R, len(ks)]: share of each row's routed experts in its K best.

    Equal scores: the lower expert id is the better one.
    """
    order = scores.sort(stable=True, dim=1, descending=True).indices
    rank = torch.empty_like(order).scatter_(1, order, torch.arange(order.shape[1]).expand_as(order))
    mine = rank.gather(1, routed)
    return torch.stack([(mine < k).float().mean(1) for k in ks], 1)


def recall_at(scores: Tensor, routed: Tensor, ks: Sequence[int] = KS) -> list[float]:
    """Means of hits_at over the rows."""
    return [float(value) for value in hits_at(scores, routed, ks).double().mean(0)]
