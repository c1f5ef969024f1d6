"""From a checkpoint to a decoder: every tensor by name, and none left over."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from torch import Tensor

from huorn.checkpoint.names import expected_tensors
from huorn.checkpoint.reader import Checkpoint
from huorn.checkpoint.weight import Weight
from huorn.model.attention import GatedAttention
from huorn.model.decoder import Decoder, DecoderLayer
from huorn.model.delta_net import GatedDeltaNet
from huorn.model.experts import MappedExperts, ResidentExperts
from huorn.model.linear import Embedding, Linear
from huorn.model.moe import ExpertProvider, MoeBlock
from huorn.model.norm import GatedRMSNorm, RMSNorm
from huorn.model.precision import Precision
from huorn.model.rotary import Rotary

EXPAND_LIMIT_BYTES = 1 << 30  # seedling takes 113 MB, the 35B shape 138 GB


def load_decoder(
    checkpoint: Checkpoint,
    precision: Precision = Precision.BF16,
    expand_limit_bytes: int = EXPAND_LIMIT_BYTES,
) -> Decoder:
    """Reads everything but the experts into RAM and checks that every text tensor was used.

    A model whose F32 expansion, experts included, is within expand_limit_bytes is expanded once. A larger one
    keeps its weights as stored and its experts in the mapped files, and expands both on use: slow, but it fits.
    Raises CheckpointError.
    """
    expand = expanded_bytes(checkpoint) <= expand_limit_bytes
    decoder = _Loader(checkpoint, precision, expand).decoder()
    checkpoint.assert_text_tensors_used()
    return decoder


def expanded_bytes(checkpoint: Checkpoint) -> int:
    """Bytes of all weights of the model in F32."""
    return sum(4 * prod(spec.shape) for spec in expected_tensors(checkpoint.config, checkpoint.layout))


@dataclass(frozen=True)
class _Loader:
    checkpoint: Checkpoint
    precision: Precision
    expand: bool

    def decoder(self) -> Decoder:
        config = self.checkpoint.config
        embed = self.checkpoint.weight("embed_tokens.weight")
        head = embed if config.tie_word_embeddings else self.checkpoint.weight("lm_head.weight")
        experts = self._experts()
        return Decoder(
            config=config,
            precision=self.precision,
            embed=Embedding(embed, self.precision),
            layers=[self._layer(layer, experts) for layer in range(config.num_hidden_layers)],
            norm=self._norm("norm.weight"),
            lm_head=self._stack(head),
            rotary=Rotary(config),
        )

    def _layer(self, layer: int, experts: ExpertProvider) -> DecoderLayer:
        prefix = f"layers.{layer}."
        full = self.checkpoint.config.layer_types[layer] == "full_attention"
        mixer = self._attention(prefix + "self_attn.") if full else self._delta_net(prefix + "linear_attn.")
        return DecoderLayer(
            input_norm=self._norm(prefix + "input_layernorm.weight"),
            mixer=mixer,
            post_attention_norm=self._norm(prefix + "post_attention_layernorm.weight"),
            moe=self._moe(layer, prefix + "mlp.", experts),
        )

    def _attention(self, prefix: str) -> GatedAttention:
        return GatedAttention(
            config=self.checkpoint.config,
            precision=self.precision,
            qkv=self._linear(prefix, "q_proj", "k_proj", "v_proj"),
            q_norm=self._norm(prefix + "q_norm.weight"),
            k_norm=self._norm(prefix + "k_norm.weight"),
            o=self._linear(prefix, "o_proj"),
        )

    def _delta_net(self, prefix: str) -> GatedDeltaNet:
        norm = GatedRMSNorm(self._vector(prefix + "norm.weight"), self.checkpoint.config.rms_norm_eps)
        return GatedDeltaNet(
            config=self.checkpoint.config,
            precision=self.precision,
            projections=self._linear(prefix, "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
            taps=self._vector(prefix + "conv1d.weight").squeeze(1).t().contiguous(),
            negative_rate=-self._vector(prefix + "A_log").exp(),
            dt_bias=self._vector(prefix + "dt_bias"),
            norm=norm,
            out=self._linear(prefix, "out_proj"),
        )

    def _moe(self, layer: int, prefix: str, experts: ExpertProvider) -> MoeBlock:
        return MoeBlock(
            layer=layer,
            top_k=self.checkpoint.config.num_experts_per_tok,
            precision=self.precision,
            router=self._linear(prefix, "gate"),
            experts=experts,
            shared_in=self._linear(
                prefix, "shared_expert.gate_proj", "shared_expert.up_proj", "shared_expert_gate"
            ),
            shared_down=self._linear(prefix, "shared_expert.down_proj"),
        )

    def _experts(self) -> ExpertProvider:
        config = self.checkpoint.config
        mapped = MappedExperts(self.checkpoint, self.precision)
        if not self.expand:
            return mapped
        return ResidentExperts(mapped, config.num_hidden_layers, config.num_experts)

    def _linear(self, prefix: str, *names: str) -> Linear:
        return self._stack(*(self.checkpoint.weight(f"{prefix}{name}.weight") for name in names))

    def _stack(self, *weights: Weight) -> Linear:
        return Linear(weights, self.precision, self.expand)

    def _norm(self, name: str) -> RMSNorm:
        return RMSNorm.zero_centered(self.checkpoint.tensor(name), self.checkpoint.config.rms_norm_eps)

    def _vector(self, name: str) -> Tensor:
        return self.checkpoint.tensor(name).float()
