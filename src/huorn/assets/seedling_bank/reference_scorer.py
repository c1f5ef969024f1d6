"""Features and scores of an expert-predictor bank in plain PyTorch: the one definition for training, release and engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from spec import (
    PREVIOUS_WINDOW,
    WINDOW,
    BankConfig,
    FeatureContract,
)


@dataclass(frozen=True, eq=False)
class Bank:
    """config.json and model.safetensors.

    Tensors over H heads, BF16: w_in [H, T, F], b_in [H, T], w_out [H, G * E + D, T], b_out, w_router [H, E, D], b_router
    [H, E], token_table [rows, width]; F32: a, b [H, G].
    """

    config: BankConfig
    tensors: Mapping[str, Tensor]


@dataclass(frozen=True, eq=False)
class Rows:
    """What is known of R tokens when each has been decoded, for H heads.

    `layers` names the S model layers that are given, `hidden_layers` those of hidden f16 [R, S', D] (what the router read).
    router_logits f16 [R, S, E]; routed [R, S, K] expert ids; previous [R, S, K] those of the token before, -1 where there was
    none; prior f32 [R, H, E] after this token (update_prior); step i64 [R] counts decoded tokens from 0; token and next_token
    i64 [R] are ids t and t+1.
    """

    layers: Sequence[int]
    hidden_layers: Sequence[int]
    hidden: Tensor
    router_logits: Tensor
    routed: Tensor
    previous: Tensor
    prior: Tensor
    step: Tensor
    token: Tensor
    next_token: Tensor


def multi_hot(ids: Tensor, experts: int) -> Tensor:
    """ids [..., K], -1 for none -> f32 [..., E]: 1 where an expert is among them."""
    ids = ids.long()
    out = torch.zeros(*ids.shape[:-1], experts + 1)
    return out.scatter_(-1, torch.where(ids < 0, experts, ids), 1.0)[..., :experts]


def update_prior(prior: Tensor, routed: Tensor, beta: float) -> Tensor:
    """The moving average of routed experts, p = beta p + (1 - beta) m: prior f32 [..., E], routed [..., K] -> f32 [..., E]."""
    return prior * beta + multi_hot(routed, prior.shape[-1]) * (1.0 - beta)


def assemble(
    contract: FeatureContract, head_layers: Sequence[int], rows: Rows, token_table: Tensor
) -> Tensor:
    """BF16 [R, H, F]: the blocks of the contract one after the other.

    Blocks of layers that do not exist or are not given are zeros. ValueError for ids that have no row in token_table.
    """
    experts = rows.prior.shape[-1]
    hidden = base_hidden(head_layers, rows)
    parts: list[Tensor] = []
    for block in contract.blocks:
        if block == "h":
            parts.append(hidden)
        elif block == "win":
            parts.append(_below(multi_hot(rows.routed, experts), rows.layers, head_layers, WINDOW))
        elif block == "prior":
            parts.append(rows.prior.to(torch.float16))
        elif block == "pos":
            parts.append(_position(contract, rows.step, len(head_layers)))
        elif block == "rl":
            known = [layer for layer in rows.layers if layer not in contract.uncaptured_logits]
            logits = rows.router_logits[:, [list(rows.layers).index(layer) for layer in known]]
            parts.append(_below(logits, known, head_layers, WINDOW))
        elif block == "prevwin":
            previous = _previous(contract, rows)
            parts.append(_below(multi_hot(previous, experts), rows.layers, head_layers, PREVIOUS_WINDOW))
        elif block == "hd":
            below = _layer_rows(rows.hidden, rows.hidden_layers, head_layers, [1])[:, :, 0]
            there = torch.tensor([float(layer - 1 in rows.hidden_layers) for layer in head_layers])
            parts.append((hidden - below) * there.to(torch.float16)[None, :, None])
        elif block == "sticky":
            parts.append(_layer_rows(multi_hot(rows.routed, experts), rows.layers, head_layers, [0])[:, :, 0])
        else:
            ids = torch.stack([rows.token, rows.next_token], 1).long()
            parts.append(_token_rows(ids, token_table)[:, None].expand(-1, len(head_layers), -1))
    return torch.cat([part.to(torch.bfloat16) for part in parts], -1)


def base_hidden(head_layers: Sequence[int], rows: Rows) -> Tensor:
    """f16 [R, H, D]: each head's own MoE input at token t, which the forecast of the next one is added to."""
    return _layer_rows(rows.hidden, rows.hidden_layers, head_layers, [0])[:, :, 0]


def _layer_rows(values: Tensor, layers: Sequence[int], heads: Sequence[int], back: Sequence[int]) -> Tensor:
    """values [R, S, n] of `layers` -> [R, H, len(back), n] of the layers L - b for head L; zeros where there is none."""
    place = {layer: number for number, layer in enumerate(layers)}
    padded = torch.cat([values, values.new_zeros(len(values), 1, values.shape[2])], 1)
    wanted = torch.tensor([[place.get(layer - b, len(place)) for b in back] for layer in heads])
    return padded[:, wanted]


def _below(values: Tensor, layers: Sequence[int], heads: Sequence[int], count: int) -> Tensor:
    """[R, H, count * n]: the layers L - 1, L - 2, ... of head L."""
    return _layer_rows(values, layers, heads, range(1, count + 1)).flatten(2)


def _position(contract: FeatureContract, step: Tensor, heads: int) -> Tensor:
    """f32 [R, H, 1]: (decode step + 1) / 256."""
    steps = step.float() + 1.0
    if contract.position_limit is not None:
        steps = steps.clamp(max=float(contract.position_limit))
    return (steps / contract.position_scale)[:, None, None].expand(-1, heads, 1)


def _previous(contract: FeatureContract, rows: Rows) -> Tensor:
    if contract.first_step == "none":
        return rows.previous
    return torch.where((rows.step == 0)[:, None, None], 0, rows.previous)


def _token_rows(ids: Tensor, table: Tensor) -> Tensor:
    """ids i64 [R, 2] -> [R, 2 * width]."""
    wrong = ids[(ids < 0) | (ids >= len(table))]
    if len(wrong):
        raise ValueError(f"token id {int(wrong[0])} has no row in the token table, which has {len(table)}")
    return table[ids].flatten(1)


def scores(bank: Bank, x: Tensor, base: Tensor) -> Tensor:
    """F32 [R, H, G, E] of features x [R, H, F] and base_hidden [R, H, D], in BF16 with the roundings that the int8 bank has too.

    Per head: u = silu(W_in x + b_in); [direct; forecast] = W_out u + b_out; hidden = base + forecast; z_g = direct_g +
    (W_router hidden + b_router).
    """
    experts, groups = bank.config.base_model.num_experts, len(bank.config.heads.horizons)
    part, out = bank.tensors, []
    for head in range(x.shape[1]):
        inputs, hidden = x[:, head].to(torch.bfloat16), base[:, head].to(torch.bfloat16)
        u = F.silu(F.linear(inputs, part["w_in"][head], part["b_in"][head]).float()).to(torch.bfloat16)
        both = F.linear(u, part["w_out"][head], part["b_out"][head])
        forecast = hidden + both[:, groups * experts :]
        routed = F.linear(forecast, part["w_router"][head], part["b_router"][head]).float()
        out.append(both[:, : groups * experts].float().unflatten(1, (groups, experts)) + routed[:, None])
    return torch.stack(out, 1)


def calibrated(bank: Bank, z: Tensor) -> Tensor:
    """Probabilities sigmoid(a z + b) of scores f32 [..., H, G, E]."""
    return torch.sigmoid(z * bank.tensors["a"][..., None] + bank.tensors["b"][..., None])


def probabilities(bank: Bank, raw: Mapping[str, Tensor], num_experts: int, ema_beta: float) -> Tensor:
    """F32 [H, G, E]: how likely each expert is routed to within 1, 4, 16 tokens, for one token.

    `raw` is Rows without the axis R, for all layers of the model, with prior f32 [H, E] as it was before this token.
    """
    rows, layers = raw_rows(bank, raw, ema_beta), bank.config.heads.layers
    if rows.router_logits.shape[-1] != num_experts:
        raise ValueError(f"router_logits are of {rows.router_logits.shape[-1]} experts, not {num_experts}")
    x = assemble(bank.config.features, layers, rows, bank.tensors["token_table"])
    return calibrated(bank, scores(bank, x, base_hidden(layers, rows)))[0]


def raw_rows(bank: Bank, raw: Mapping[str, Tensor], ema_beta: float) -> Rows:
    """Rows with R = 1 of what one token left behind (see probabilities)."""
    prior = update_prior(raw["prior"], raw["routed"][list(bank.config.heads.layers)], ema_beta)
    each = {
        name: raw[name][None]
        for name in ("hidden", "router_logits", "routed", "previous", "step", "token", "next_token")
    }
    every = range(len(raw["routed"]))
    return Rows(layers=every, hidden_layers=every, prior=prior[None], **each)
