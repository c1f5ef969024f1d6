"""Gated delta net layer: projections, a short causal convolution, the delta rule, a gated norm."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from huorn.checkpoint.config import ModelConfig
from huorn.model.delta_rule import delta_rule
from huorn.model.linear import Linear
from huorn.model.norm import GatedRMSNorm
from huorn.model.precision import Precision


@dataclass(frozen=True, eq=False)
class GatedDeltaNet:
    """One linear attention layer. projections stacks in_proj_qkv, in_proj_z, in_proj_b, in_proj_a.

    taps f32 [kernel, conv_dim] of the convolution, oldest first; negative_rate = -exp(A_log) and dt_bias f32 [Hv].
    """

    config: ModelConfig
    precision: Precision
    projections: Linear
    taps: Tensor
    negative_rate: Tensor
    dt_bias: Tensor
    norm: GatedRMSNorm
    out: Linear

    def __call__(self, x: Tensor, conv: Tensor, recurrent: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x f32 [T, D], the operand; conv f32 [kernel - 1, conv_dim] and recurrent f32 [Hv, dk, dv], the state
        before -> f32 [T, D] and both states after, as new tensors."""
        config, tokens = self.config, x.shape[0]
        key_heads, value_heads = config.linear_num_key_heads, config.linear_num_value_heads
        sizes = [config.conv_dim, config.value_dim, value_heads, value_heads]
        qkv, z, b, a = self.projections(x).split_with_sizes(sizes, dim=-1)

        qkv, conv = causal_conv(qkv, conv, self.taps)
        qk, value = F.silu(qkv).split_with_sizes([2 * config.key_dim, config.value_dim], dim=-1)
        qk = l2_norm(qk.view(tokens, 2 * key_heads, config.linear_key_head_dim))
        # Value head h reads key head h // (Hv / Hk).
        qk = qk.unsqueeze(2).expand(-1, -1, value_heads // key_heads, -1).flatten(1, 2)
        query, key = qk.chunk(2, dim=1)
        log_decay = self.negative_rate * F.softplus(a + self.dt_bias)

        mixed, recurrent = delta_rule(
            query * config.linear_key_head_dim**-0.5,
            key,
            value.view(tokens, value_heads, config.linear_value_head_dim),
            log_decay,
            b.sigmoid(),
            recurrent,
        )
        gated = self.norm(mixed, z.view(tokens, value_heads, config.linear_value_head_dim))
        return self.out(self.precision.operand(gated.view(tokens, -1))), conv, recurrent


def causal_conv(x: Tensor, before: Tensor, taps: Tensor) -> tuple[Tensor, Tensor]:
    """Depthwise causal convolution y_t = sum_j taps_j * x_(t - kernel + 1 + j), one filter per channel.

    x f32 [T, C], before f32 [kernel - 1, C] (the inputs just before x), taps f32 [kernel, C] -> y f32 [T, C] and
    the last kernel - 1 inputs, a new tensor. Right for any T >= 1, also T < kernel.
    """
    tokens = x.shape[0]
    inputs = torch.cat((before, x))
    window = inputs[tokens:].clone()  # a view would keep all T inputs alive
    if tokens == 1:
        return (inputs * taps).sum(0, keepdim=True), window  # 3 small operations instead of 14
    y = inputs[:tokens] * taps[0]
    for j in range(1, taps.shape[0]):
        y.addcmul_(inputs[j : j + tokens], taps[j])
    return y, window


def l2_norm(x: Tensor) -> Tensor:
    """x / sqrt(sum(x^2) + 1e-6) over the last dimension; the model was trained with this constant."""
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
