"""The gated delta rule (Gated Delta Networks, arXiv 2412.06464), per head, all in F32.

    S_t = a_t S_{t-1} + k_t d_t^T    d_t = beta_t (v_t - a_t S_{t-1}^T k_t)    o_t = S_t^T q_t    a_t = exp(g_t)

S [dk, dv] is a memory of values by key: it decays by a_t, and what it holds for k_t moves towards v_t by beta_t.
"""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK = 64  # tokens solved at once: the triangular system is CHUNK x CHUNK per head


def delta_rule(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """T tokens from a given state; one token as the recurrence, more in chunks.

    query (scaled) and key f32 [T, H, dk], value f32 [T, H, dv], log_decay (<= 0) and beta f32 [T, H],
    state f32 [H, dk, dv] -> outputs f32 [T, H, dv] and the new state, a new tensor.
    """
    if query.shape[0] == 1:
        return delta_step(query, key, value, log_decay, beta, state)
    outputs = []
    pieces = (tensor.split(CHUNK) for tensor in (query, key, value, log_decay, beta))
    for q, k, v, g, b in zip(*pieces, strict=True):
        output, state = delta_chunk(q, k, v, g, b, state)
        outputs.append(output)
    return torch.cat(outputs), state


def delta_step(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The recurrence for one token; shapes of `delta_rule` with T = 1."""
    q, k, v = query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)  # [H, 1, dk or dv]
    state = state * log_decay.exp().view(-1, 1, 1)
    correction = beta.view(-1, 1, 1) * (v - torch.bmm(k, state))
    state = torch.baddbmm(state, k.transpose(1, 2), correction)
    return torch.bmm(q, state).transpose(0, 1), state


def delta_chunk(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The recurrence for C <= CHUNK tokens as matmuls (the WY form of a product of Householder-like factors).

    With G_t = g_1 + .. + g_t and S the state before the chunk, unrolling gives for every token t

        d_t + beta_t sum_{s<t} exp(G_t - G_s) (k_t . k_s) d_s = beta_t (v_t - exp(G_t) S^T k_t)
        o_t = exp(G_t) S^T q_t + sum_{s<=t} exp(G_t - G_s) (q_t . k_s) d_s
        S'  = exp(G_C) S + sum_s exp(G_C - G_s) k_s d_s^T

    so the corrections d solve one unit lower triangular system. Shapes of `delta_rule` with T = C.
    """
    q, k, v = query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)  # [H, C, dk or dv]
    beta = beta.t().unsqueeze(-1)  # [H, C, 1]
    # Sums of log decays in F64: they reach -1000 in a chunk, where the F32 difference of two is wrong by 6e-5.
    total = log_decay.t().double().cumsum(-1)  # [H, C]
    since = (total.unsqueeze(2) - total.unsqueeze(1)).float()  # [H, C, C]: log decay from token s to token t
    count = since.shape[-1]
    future = torch.ones(count, count, dtype=torch.bool).triu(1)
    decay = since.masked_fill_(
        future, float("-inf")
    ).exp()  # [H, C, C]; above the diagonal exp would overflow
    from_start = total.exp().float().unsqueeze(-1)  # [H, C, 1]
    to_end = (total[:, -1:] - total).exp().float().unsqueeze(-1)  # [H, C, 1]

    known = beta * (v - from_start * torch.bmm(k, state))
    system = beta * torch.bmm(k, k.transpose(1, 2)) * decay  # the solver takes the diagonal as 1
    corrections = torch.linalg.solve_triangular(system, known, upper=False, unitriangular=True)

    attention = torch.bmm(q, k.transpose(1, 2)) * decay
    output = from_start * torch.bmm(q, state) + torch.bmm(attention, corrections)
    state = from_start[:, -1:] * state + torch.bmm((k * to_end).transpose(1, 2), corrections)
    return output.transpose(0, 1), state
