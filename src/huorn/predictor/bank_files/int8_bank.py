"""A bank of expert predictors in INT8: how weights are quantised, and how a bank scores experts. Needs torch alone.

One head per MoE layer forecasts which of its E experts the tokens ahead will need, in G groups of outputs (such as: the next
token, within 4, within 16). From features x [F] and the hidden state h [D] of the present token, both rounded to BF16,

    u = bf16(silu(bf16(w_in x + b_in)))          trunk [T]
    o = bf16(w_out u + b_out)                    [G E + D]: corrections d [G, E], then a change of the hidden state
    f = bf16(h + o[G E:])                        the forecast hidden state
    r = bf16(w_router f + b_router)              [E]
    z[g] = d[g] + r                              scores, in F32
    p[g] = sigmoid(a[g] z[g] + b[g])             calibrated probabilities, in F32

A weight is INT8 codes with one F32 scale for each 128 inputs of a row, weight ~ scale * codes. A product is the F32 sum over
these groups of scale * (codes . x), and biases, in F32, are added before the one rounding to BF16. Code times input, 7 and 8
bits, is exact in F32. So a term is rounded at most n = Kp / 128 + 130 times in any order of summation. With g = n u / (1 - n u)
and u = 2^-24, what is rounded to BF16 is within g (sum |scale code x| + |bias|) of the exact sum (Higham, Accuracy and Stability
of Numerical Algorithms, 3.1).

Tensors of a bank of H heads, Fp and Dp being F and D rounded up to 128; T is a multiple of 128:

    w_in.codes     int8 [H, T, Fp]       w_in.scale     f32 [H, T, Fp / 128]       b_in     f32 [H, T]
    w_out.codes    int8 [H, G E + D, T]  w_out.scale    f32 [H, G E + D, T / 128]  b_out    f32 [H, G E + D]
    w_router.codes int8 [H, E, Dp]       w_router.scale f32 [H, E, Dp / 128]       b_router f32 [H, E]
    a, b           f32 [H, G]
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import pad, silu

GROUP = 128  # inputs of a row that share one scale
_LEAST_SCALE = 2.0**-126  # smaller ones are not normal numbers: such a group counts as zero


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes int8 [..., N, Kp] and scale f32 [..., N, Kp / 128] of a weight [..., N, K], rounded to BF16 first; zeros behind K.

    The scale is max |w| / 127 over a group of 128 inputs, a code w / scale rounded half to even; a group of zeros, or of
    numbers so small that its scale would not be a normal F32 number, has scale 0 and codes 0. In other groups
    |w - scale * code| is at most scale / 2 (1 + 2^-15). ValueError for NaN or infinity.
    """
    weight = weight.detach().bfloat16().float()
    if not torch.isfinite(weight).all():
        raise ValueError("the weight holds NaN or infinity (in BF16): only finite weights have codes")
    groups = pad(weight, (0, -weight.shape[-1] % GROUP)).unflatten(-1, (-1, GROUP))
    scale = groups.abs().amax(-1) / 127
    scale = torch.where(scale < _LEAST_SCALE, 0.0, scale)
    codes = torch.round(groups / torch.where(scale == 0, torch.inf, scale)[..., None])
    return codes.to(torch.int8).flatten(-2), scale


def grouped_linear(codes: Tensor, scale: Tensor, bias: Tensor, x: Tensor) -> Tensor:
    """bf16 [..., N] of codes int8 [N, Kp], scale f32 [N, Kp / 128], bias f32 [N] and x [..., K], rounded to BF16; K up to Kp.

    The matmul inside has to be one in F32, torch's default: not TF32.
    """
    rows, padded = codes.shape
    if padded == 0:  # a bank without hidden states
        return bias.bfloat16().expand(*x.shape[:-1], rows)
    x = pad(x.bfloat16().float(), (0, padded - x.shape[-1]))
    batch = x.reshape(-1, padded // GROUP, GROUP).transpose(0, 1)  # [groups, B, 128]
    weight = codes.float().view(rows, -1, GROUP).permute(1, 2, 0)  # [groups, 128, N]
    parts = torch.bmm(batch, weight) * scale.t()[:, None, :]
    return (parts.sum(0) + bias).bfloat16().reshape(*x.shape[:-1], rows)


def score_head(tensors: Mapping[str, Tensor], head: int, x: Tensor, base: Tensor) -> tuple[Tensor, Tensor]:
    """Scores and probabilities f32 [..., G, E] of one head for x [..., F] and base [..., D], of any float dtype."""

    def product(name: str, inputs: Tensor) -> Tensor:
        codes, scale = tensors[f"w_{name}.codes"][head], tensors[f"w_{name}.scale"][head]
        return grouped_linear(codes, scale, tensors[f"b_{name}"][head], inputs)

    a, b = tensors["a"][head], tensors["b"][head]
    outputs, experts = len(a), tensors["b_router"].shape[-1]
    u = silu(product("in", x).float()).bfloat16()
    o = product("out", u)
    forecast = base.bfloat16() + o[..., outputs * experts :]
    router = product("router", forecast)
    corrections = o[..., : outputs * experts].unflatten(-1, (outputs, experts))
    scores = corrections.float() + router.float()[..., None, :]
    return scores, torch.sigmoid(a[:, None] * scores + b[:, None])


def score(tensors: Mapping[str, Tensor], x: Tensor, base: Tensor) -> tuple[Tensor, Tensor]:
    """Scores and probabilities f32 [..., H, G, E] of all heads for x [..., H, F] and base [..., H, D], of any float dtype."""
    heads = len(tensors["a"])
    each = [score_head(tensors, head, x[..., head, :], base[..., head, :]) for head in range(heads)]
    return torch.stack([scores for scores, _ in each], -3), torch.stack([p for _, p in each], -3)
