"""Rotary and causal attention against their definitions in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import huorn.model.attention as attention
from huorn.model.attention import causal_attention
from huorn.model.precision import Precision
from huorn.model.rotary import Rotary

from .shapes import small_config


def exact_attention(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """One query and one head at a time, f64 [T, H, head_dim]."""
    query, keys, values = query.double(), keys.double(), values.double()
    tokens, heads, dim = query.shape
    total, group = keys.shape[0], heads // keys.shape[1]
    out = torch.empty(tokens, heads, dim, dtype=torch.float64)
    for t in range(tokens):
        for h in range(heads):
            seen = total - tokens + t + 1
            weights = (keys[:seen, h // group] @ query[t, h] / dim**0.5).softmax(0)
            out[t, h] = weights @ values[:seen, h // group]
    return out


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize(("tokens", "total"), [(1, 1), (1, 9), (3, 3), (5, 12)])
def test_causal_attention(kv_heads: int, tokens: int, total: int, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(tokens)
    query = torch.randn(tokens, 4, 6, generator=generator) * 3
    keys, values = torch.randn(2, total, kv_heads, 6, generator=generator)
    exact = exact_attention(query, keys, values)
    assert torch.allclose(causal_attention(query, keys, values, Precision.F32).double(), exact, atol=1e-5)
    monkeypatch.setattr(attention, "SCORE_BYTES", 2 * 4 * 4 * total)  # blocks of two queries
    assert torch.allclose(causal_attention(query, keys, values, Precision.F32).double(), exact, atol=1e-5)


def test_rotary_is_a_complex_turn_of_the_first_dimensions() -> None:
    config = small_config(head_dim=12, partial_rotary_factor=0.5, rope_theta=100.0)
    x = torch.randn(4, 2, 12, generator=torch.Generator().manual_seed(0))
    turned = Rotary(config).at(7, 4)(x)
    angles = torch.arange(7, 11)[:, None].double() * 100.0 ** (-torch.arange(0, 6, 2).double() / 6)
    complex_x = (
        torch.complex(x[..., :3].double(), x[..., 3:6].double())
        * torch.polar(torch.ones(4, 3).double(), angles)[:, None]
    )
    assert torch.allclose(turned[..., :3].double(), complex_x.real, atol=1e-5)
    assert torch.allclose(turned[..., 3:6].double(), complex_x.imag, atol=1e-5)
    assert torch.equal(turned[..., 6:], x[..., 6:])


def test_far_positions_use_the_frequencies_of_training() -> None:
    """transformers' angles at position 262,143 of the 35B shape, with interleaved mrope sections and three equal position
    grids: plain rotary with the same F32 frequencies."""
    from transformers import Qwen3_5MoeTextConfig
    from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeTextRotaryEmbedding

    theirs = Qwen3_5MoeTextRotaryEmbedding(
        Qwen3_5MoeTextConfig(
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 1e7,
                "partial_rotary_factor": 0.25,
                "mrope_interleaved": True,
                "mrope_section": [11, 11, 10],
            }
        )
    )
    cos, sin = theirs(torch.zeros(1), torch.tensor([[[262_140, 262_141, 262_142, 262_143]]]))
    ours = Rotary(small_config(head_dim=256, partial_rotary_factor=0.25, rope_theta=1e7)).at(262_140, 4)
    assert torch.equal(ours.cos[:, 0], cos[0, :, :32])
    assert torch.equal(ours.sin[:, 0], sin[0, :, :32])
