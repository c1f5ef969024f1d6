"""seedling's forward pass for training: the same mathematics as `huorn.model`, batched and with gradients.

Weights are F32 leaves named as in the official checkpoint (experts stacked as gate_up_proj [E, 2I, D] and down_proj
[E, D, I]); matrix products run in BF16, the residual stream, norms, router softmax and delta-net state in F32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from training.native import ConvSilu, CrossEntropy, DeltaScan, GatedNorm, RMSNorm, RoutedExperts, fused

BF16 = torch.bfloat16


@dataclass(frozen=True)
class Shape:
    """seedling's configuration, in the terms of config.json."""

    hidden_size: int = 256
    num_hidden_layers: int = 8
    full_attention_interval: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    partial_rotary_factor: float = 0.25
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-6
    num_experts: int = 64
    num_experts_per_tok: int = 8
    moe_intermediate_size: int = 64
    shared_expert_intermediate_size: int = 64
    linear_num_key_heads: int = 2
    linear_num_value_heads: int = 4
    linear_key_head_dim: int = 64
    linear_value_head_dim: int = 64
    linear_conv_kernel_dim: int = 4
    vocab_size: int = 4096
    max_position_embeddings: int = 4096

    def __post_init__(self) -> None:
        if (
            self.num_attention_heads % self.num_key_value_heads
            or self.linear_num_value_heads % self.linear_num_key_heads
        ):
            raise ValueError("head counts must divide")

    @property
    def layer_types(self) -> list[str]:
        interval = self.full_attention_interval
        return [
            "linear_attention" if (i + 1) % interval else "full_attention"
            for i in range(self.num_hidden_layers)
        ]

    @property
    def key_dim(self) -> int:
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def value_dim(self) -> int:
        return self.linear_num_value_heads * self.linear_value_head_dim


def init_weights(shape: Shape, seed: int) -> dict[str, Tensor]:
    """F32 weights by name. Matrices are normal with std 1/sqrt(fan in); what writes to the residual stream starts at
    zero, so the first steps train the embedding and the head alone."""
    d, e, i, v = (
        shape.hidden_size,
        shape.num_experts,
        shape.moe_intermediate_size,
        shape.linear_num_value_heads,
    )
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int, std: float | None = None) -> Tensor:
        return torch.randn(*size, generator=generator) * (std if std is not None else size[-1] ** -0.5)

    weights = {"embed_tokens.weight": normal(shape.vocab_size, d, std=0.1)}
    for layer, kind in enumerate(shape.layer_types):
        p = f"layers.{layer}."
        weights[p + "input_layernorm.weight"] = torch.zeros(d)
        weights[p + "post_attention_layernorm.weight"] = torch.zeros(d)
        if kind == "full_attention":
            heads, kv, size = shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim
            weights[p + "self_attn.q_proj.weight"] = normal(heads * size * 2, d)
            weights[p + "self_attn.k_proj.weight"] = normal(kv * size, d)
            weights[p + "self_attn.v_proj.weight"] = normal(kv * size, d)
            weights[p + "self_attn.o_proj.weight"] = torch.zeros(d, heads * size)
            weights[p + "self_attn.q_norm.weight"] = torch.zeros(size)
            weights[p + "self_attn.k_norm.weight"] = torch.zeros(size)
        else:
            conv = 2 * shape.key_dim + shape.value_dim
            weights[p + "linear_attn.in_proj_qkv.weight"] = normal(conv, d)
            weights[p + "linear_attn.in_proj_z.weight"] = normal(shape.value_dim, d)
            weights[p + "linear_attn.in_proj_a.weight"] = normal(v, d, std=0.02)
            weights[p + "linear_attn.in_proj_b.weight"] = normal(v, d, std=0.02)
            weights[p + "linear_attn.conv1d.weight"] = normal(conv, 1, shape.linear_conv_kernel_dim, std=0.2)
            weights[p + "linear_attn.conv1d.weight"][:, :, -1] += 1.0  # starts near the identity
            # exp(A_log) * softplus(dt_bias) spread from 0.6 to 0.003 per token: memories of 2 to 300 tokens
            weights[p + "linear_attn.A_log"] = torch.linspace(math.log(1.0), math.log(0.05), v)
            weights[p + "linear_attn.dt_bias"] = torch.linspace(-0.2, -2.8, v)
            weights[p + "linear_attn.norm.weight"] = torch.ones(shape.linear_value_head_dim)
            weights[p + "linear_attn.out_proj.weight"] = torch.zeros(d, shape.value_dim)
        weights[p + "mlp.gate.weight"] = normal(e, d, std=0.02)
        weights[p + "mlp.experts.gate_up_proj"] = normal(e, 2 * i, d)
        weights[p + "mlp.experts.down_proj"] = torch.zeros(e, d, i)
        shared = shape.shared_expert_intermediate_size
        weights[p + "mlp.shared_expert.gate_proj.weight"] = normal(shared, d)
        weights[p + "mlp.shared_expert.up_proj.weight"] = normal(shared, d)
        weights[p + "mlp.shared_expert.down_proj.weight"] = torch.zeros(d, shared)
        weights[p + "mlp.shared_expert_gate.weight"] = torch.zeros(1, d)
    weights["norm.weight"] = torch.zeros(d)
    weights["lm_head.weight"] = torch.zeros(shape.vocab_size, d)
    return weights


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [..., D] bf16, weight [O, D] f32 -> [..., O] bf16."""
    return F.linear(x, weight.to(BF16))


def rotary(x: Tensor, shape: Shape) -> Tensor:
    """Rotate the first `head_dim * partial_rotary_factor` dimensions of x [B, H, S, head_dim] by position."""
    size = int(shape.head_dim * shape.partial_rotary_factor)
    frequency = shape.rope_theta ** -(torch.arange(0, size, 2) / size)
    angle = torch.arange(x.shape[2])[:, None] * frequency
    cos, sin = angle.cos(), angle.sin()
    first, second, rest = x.split([size // 2, size // 2, shape.head_dim - size], dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


class Seedling:
    """Forward pass over `weights`; holds no state of its own besides the routing of the last call."""

    def __init__(self, shape: Shape, weights: dict[str, Tensor]) -> None:
        self.shape, self.weights = shape, weights
        self.routing: list[Tensor] = []  # ids [N, K] of each layer in the last forward

    def loss(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """tokens, targets [B, S] int64 -> (mean cross entropy in nats, mean balancing loss over layers)."""
        x, balance = self.hidden(tokens)
        return fused(CrossEntropy, x, self.weights["lm_head.weight"], targets.reshape(-1)), balance

    def hidden(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """tokens [B, S] -> (final normed hidden [B * S, D] bf16, balancing loss)."""
        b, s = tokens.shape
        x = F.embedding(tokens.reshape(-1), self.weights["embed_tokens.weight"])
        self.routing, balance = [], torch.zeros(())
        for layer, kind in enumerate(self.shape.layer_types):
            mix = self.attention if kind == "full_attention" else self.delta_net
            x = x + mix(layer, self.norm(x, f"layers.{layer}.input_layernorm.weight"), b, s).float()
            out, spread = self.moe(layer, self.norm(x, f"layers.{layer}.post_attention_layernorm.weight"))
            x, balance = x + out, balance + spread
        return self.norm(x, "norm.weight"), balance / self.shape.num_hidden_layers

    def norm(self, x: Tensor, name: str) -> Tensor:
        return fused(RMSNorm, x, self.weights[name], self.shape.rms_norm_eps)

    def attention(self, layer: int, x: Tensor, b: int, s: int) -> Tensor:
        """Gated full attention. x [B * S, D] bf16 -> [B * S, D] bf16."""
        shape, w, p = self.shape, self.weights, f"layers.{layer}.self_attn."
        heads, kv, size = shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim
        q, gate = linear(x, w[p + "q_proj.weight"]).view(b, s, heads, 2 * size).split(size, dim=-1)
        k = linear(x, w[p + "k_proj.weight"]).view(b, s, kv, size)
        v = linear(x, w[p + "v_proj.weight"]).view(b, s, kv, size)
        q = F.rms_norm(q.float(), (size,), 1.0 + w[p + "q_norm.weight"], shape.rms_norm_eps)
        k = F.rms_norm(k.float(), (size,), 1.0 + w[p + "k_norm.weight"], shape.rms_norm_eps)
        q, k = rotary(q.transpose(1, 2), shape).to(BF16), rotary(k.transpose(1, 2), shape).to(BF16)
        group = heads // kv
        k, v = k.repeat_interleave(group, dim=1), v.transpose(1, 2).repeat_interleave(group, dim=1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        out = (out.float() * gate.float().sigmoid()).to(BF16).reshape(b * s, heads * size)
        return linear(out, w[p + "o_proj.weight"])

    def delta_net(self, layer: int, x: Tensor, b: int, s: int) -> Tensor:
        """Gated delta net. x [B * S, D] bf16 -> [B * S, D] bf16."""
        shape, w, p = self.shape, self.weights, f"layers.{layer}.linear_attn."
        hk, hv, dk, dv = (
            shape.linear_num_key_heads,
            shape.linear_num_value_heads,
            shape.linear_key_head_dim,
            shape.linear_value_head_dim,
        )
        qkv = linear(x, w[p + "in_proj_qkv.weight"]).view(b, s, -1)
        qkv = fused(ConvSilu, qkv, w[p + "conv1d.weight"].squeeze(1))
        q, k, v = qkv.split([shape.key_dim, shape.key_dim, shape.value_dim], dim=-1)
        q = l2_norm(q.reshape(b, s, hk, dk).float()) * dk**-0.5
        k = l2_norm(k.reshape(b, s, hk, dk).float())
        a, beta = linear(x, w[p + "in_proj_a.weight"]).float(), linear(x, w[p + "in_proj_b.weight"]).float()
        g = -w[p + "A_log"].exp() * F.softplus(a + w[p + "dt_bias"])
        out = fused(DeltaScan, q, k, v.reshape(b, s, hv, dv), g.view(b, s, hv), beta.sigmoid().view(b, s, hv))
        z = linear(x, w[p + "in_proj_z.weight"]).view(-1, dv)
        out = fused(GatedNorm, out.reshape(-1, dv), z, w[p + "norm.weight"], shape.rms_norm_eps)
        return linear(out.view(b * s, -1), w[p + "out_proj.weight"])

    def moe(self, layer: int, x: Tensor) -> tuple[Tensor, Tensor]:
        """MoE block. x [N, D] bf16 -> ([N, D] f32, balancing loss: E * sum of share routed times mean probability)."""
        shape, w, p = self.shape, self.weights, f"layers.{layer}.mlp."
        probability = linear(x, w[p + "gate.weight"]).float().softmax(-1)
        top, ids = probability.topk(shape.num_experts_per_tok, dim=-1)
        self.routing.append(ids)
        routed = fused(
            RoutedExperts,
            x,
            ids,
            top / top.sum(-1, keepdim=True),
            w[p + "experts.gate_up_proj"],
            w[p + "experts.down_proj"],
        )
        share = torch.bincount(ids.reshape(-1), minlength=shape.num_experts) / ids.numel()
        balance = shape.num_experts * (share * probability.mean(0)).sum()
        gate_up = torch.cat([w[p + "shared_expert.gate_proj.weight"], w[p + "shared_expert.up_proj.weight"]])
        gate, up = linear(x, gate_up).float().chunk(2, dim=-1)
        shared = linear((F.silu(gate) * up).to(BF16), w[p + "shared_expert.down_proj.weight"]).float()
        scale = linear(x, w[p + "shared_expert_gate.weight"]).float().sigmoid()
        return routed + scale * shared, balance


def l2_norm(x: Tensor) -> Tensor:
    """x / |x| over the last dimension, with the epsilon of the released model inside the root."""
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
