"""Scores to probabilities: p = sigmoid(a z + b), one pair for each group of outputs, fitted on validation rows (Platt 1999)."""

from __future__ import annotations

import torch
from torch import Tensor

_STEPS = 50
_RIDGE = 1e-6


def fit_calibration(z: Tensor, used: Tensor) -> tuple[float, float]:
    """(a, b) that minimise the cross entropy of used, 0 or 1, given scores z of the same shape: Newton's method in float64.

    Stays at (1, 0) where all outcomes are alike, since nothing can be learned there.
    """
    x, y = z.flatten().double(), used.flatten().double()
    a, b = 1.0, 0.0
    if not len(y) or float(y.min()) == float(y.max()):
        return a, b
    for _ in range(_STEPS):
        p = torch.sigmoid(a * x + b)
        rest, weight = p - y, p * (1 - p)
        gradient = torch.stack([(rest * x).mean(), rest.mean()])
        cross = (weight * x).mean()
        hessian = torch.stack(
            [torch.stack([(weight * x * x).mean(), cross]), torch.stack([cross, weight.mean()])]
        )
        step = torch.linalg.solve(hessian + _RIDGE * torch.eye(2, dtype=torch.float64), gradient)
        # A full step may overshoot where nearly all outputs are certain.
        step = step * min(1.0, 2.0 / float(step.abs().max().clamp(min=1e-12)))
        a, b = a - float(step[0]), b - float(step[1])
        if float(step.abs().max()) < 1e-9:
            break
    return a, b
