"""The chunked delta rule and its single step against the recurrence, token by token, in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from huorn.model.delta_rule import CHUNK, delta_rule

Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def random_inputs(tokens: int, strongest_decay: float, seed: int = 0) -> Inputs:
    """query, key [T, 3, 8], value [T, 3, 5], log decay and beta [T, 3], state [3, 8, 5]; keys of length 1."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    key = torch.nn.functional.normalize(randn(tokens, 3, 8), dim=-1)
    log_decay = -strongest_decay * torch.rand(tokens, 3, generator=generator) ** 4
    return (
        randn(tokens, 3, 8),
        key,
        randn(tokens, 3, 5),
        log_decay,
        randn(tokens, 3).sigmoid(),
        randn(3, 8, 5),
    )


def recurrence(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """The definition, in float64: outputs [T, H, dv] and the last state."""
    query, key, value, log_decay, beta, state = (tensor.double() for tensor in inputs)
    outputs = []
    for q, k, v, g, b in zip(query, key, value, log_decay, beta, strict=True):
        state = torch.exp(g)[:, None, None] * state
        held = torch.einsum("hkv,hk->hv", state, k)
        state = state + torch.einsum("hk,hv->hkv", k, b[:, None] * (v - held))
        outputs.append(torch.einsum("hkv,hk->hv", state, q))
    return torch.stack(outputs), state


def relative(ours: Tensor, exact: Tensor) -> float:
    return float((ours.double() - exact).abs().max() / exact.abs().max())


@pytest.mark.parametrize("tokens", [1, 2, 3, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5])
@pytest.mark.parametrize("strongest_decay", [0.0, 0.1, 20.0, 1000.0])
def test_against_the_recurrence(tokens: int, strongest_decay: float) -> None:
    inputs = random_inputs(tokens, strongest_decay)
    outputs, state = delta_rule(*inputs)
    exact_outputs, exact_state = recurrence(inputs)
    assert outputs.shape == exact_outputs.shape
    assert relative(outputs, exact_outputs) < 3e-6
    assert relative(state, exact_state) < 3e-6


def test_long_decays_do_not_spoil_neighbours() -> None:
    """After decays that add up to -1000 in a chunk, a slow decay between neighbours must still be exact: a difference of
    sums kept in F32 would be wrong by 3e-5 here."""
    query, key, value, log_decay, beta, state = random_inputs(CHUNK, 0.0)
    log_decay[: CHUNK // 2] = -31.7
    log_decay[CHUNK // 2 :] = -0.0123
    inputs = (query, key, value, log_decay, beta, state)
    outputs, after = delta_rule(*inputs)
    exact_outputs, exact_after = recurrence(inputs)
    assert relative(outputs[CHUNK // 2 :], exact_outputs[CHUNK // 2 :]) < 2e-6
    assert relative(after, exact_after) < 2e-6


def test_repeated_key_overwrites() -> None:
    """With beta 1 and no decay, the memory of one key is the last value written to it."""
    key = torch.nn.functional.one_hot(torch.tensor([0, 1, 0]), 8).float()[:, None]
    value = torch.tensor([[[1.0, 2.0]], [[3.0, 4.0]], [[5.0, 6.0]]])
    ones, zeros = torch.ones(3, 1), torch.zeros(3, 1)
    outputs, state = delta_rule(key, key, value, zeros, ones, torch.zeros(1, 8, 2))
    assert torch.allclose(outputs, value)
    assert torch.allclose(state[0, :2], torch.tensor([[5.0, 6.0], [3.0, 4.0]]))


def test_the_given_state_is_not_changed() -> None:
    for tokens in (1, 5):
        inputs = random_inputs(tokens, 1.0)
        before = inputs[-1].clone()
        delta_rule(*inputs)
        assert torch.equal(inputs[-1], before)
