"""The causal convolution at every length, also shorter than its kernel, against torch's conv1d in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from huorn.model.delta_net import causal_conv

CHANNELS, TOTAL = 7, 11


def exact(x: Tensor, taps: Tensor) -> Tensor:
    """conv1d over the whole sequence with zeros before it: f64 [T, C]."""
    padded = F.pad(x.double().t()[None], (taps.shape[0] - 1, 0))
    return F.conv1d(padded, taps.double().t()[:, None], groups=CHANNELS)[0].t()


@pytest.mark.parametrize("kernel", [2, 3, 4, 5])
@pytest.mark.parametrize("lengths", [[11], [1] * 11, [2, 2, 2, 2, 3], [3, 8], [1, 2, 3, 5]])
def test_any_cut(kernel: int, lengths: list[int]) -> None:
    generator = torch.Generator().manual_seed(kernel)
    x, taps = (
        torch.randn(TOTAL, CHANNELS, generator=generator),
        torch.randn(kernel, CHANNELS, generator=generator),
    )
    window = torch.zeros(kernel - 1, CHANNELS)
    pieces = []
    for piece in x.split(lengths):
        y, window = causal_conv(piece, window, taps)
        pieces.append(y)
    assert torch.allclose(torch.cat(pieces).double(), exact(x, taps), atol=1e-6, rtol=0)
    assert torch.equal(window, x[TOTAL - kernel + 1 :])


def test_a_long_chunk_is_not_kept_alive_by_its_window() -> None:
    _, window = causal_conv(torch.randn(1000, CHANNELS), torch.zeros(3, CHANNELS), torch.randn(4, CHANNELS))
    assert window.untyped_storage().nbytes() == 3 * CHANNELS * 4
