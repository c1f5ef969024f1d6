"""From a checkpoint to the decoder on native kernels: every tensor by name, and none left over."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from huorn import _native
from huorn.checkpoint.reader import Checkpoint
from huorn.checkpoint.row_table import RowTable
from huorn.checkpoint.tensor_check import kind_of
from huorn.kernels.huge_pages import HugePages, padded
from huorn.kernels.operand import Operand, common_format
from huorn.model.cpu_decoder import CpuDecoder, CpuLayer
from huorn.model.cpu_experts import ExpertTable, ResidentTable
from huorn.model.head import FullHead, Head, Norm
from huorn.model.precision import Precision
from huorn.model.rotary import Rotary
from huorn.model.tables import Tables, coded_bytes
from huorn.model.two_pass_head import TwoPassHead


def load_cpu_decoder(
    checkpoint: Checkpoint,
    precision: Precision,
    runtime: _native.Runtime,
    table: ExpertTable | None = None,
    tables: Tables | None = None,
) -> CpuDecoder:
    """Reads everything that every token needs into huge pages. The experts are those of `table`; without one all are read too.
    `tables` says where embedding and lm_head lie, by default as Tables.of has it.
    Checks that every text tensor was used.

    Raises CheckpointError; OSError when memory is refused.
    """
    tables = tables or Tables.of(checkpoint, precision)
    needed, experts = stored_bytes(checkpoint, tables)
    memory = HugePages(needed + (experts if table is None else 0))
    decoder = _Loader(checkpoint, precision, runtime, memory, tables).decoder(table)
    checkpoint.assert_text_tensors_used()
    return decoder


def stored_bytes(checkpoint: Checkpoint, tables: Tables) -> tuple[int, int]:
    """(bytes of the weights that every token needs, bytes of the routed experts), as HugePages packs them: as stored, but for the
    tables."""
    needed = experts = 0
    for name, info in checkpoint.infos.items():
        if kind_of(name) != "text":
            continue
        if ".mlp.experts." not in name:
            needed += padded(tables.held_bytes(name, info.nbytes))
        elif checkpoint.layout.fused_experts:
            count = checkpoint.config.num_experts
            experts += count * padded(info.nbytes // count)
        else:
            experts += padded(info.nbytes)
    return needed, experts


@dataclass
class _Loader:
    checkpoint: Checkpoint
    precision: Precision
    runtime: _native.Runtime
    memory: HugePages
    tables: Tables
    alive: list[object] = field(default_factory=list)

    def decoder(self, table: ExpertTable | None) -> CpuDecoder:
        config = self.checkpoint.config
        embedding = self._embedding()
        head = self._head(embedding)
        layers = [self._mixer(layer) for layer in range(config.num_hidden_layers)]
        table = table or ResidentTable(self.checkpoint, self._f32, self.memory)
        return CpuDecoder(
            config=config,
            precision=self.precision,
            runtime=self.runtime,
            embedding=embedding,
            layers=[self._layer(number, mixer, table) for number, mixer in enumerate(layers)],
            experts=table,
            head=head,
            rotary=Rotary(config),
            alive=self.alive,
        )

    def _embedding(self) -> Operand | RowTable:
        name = "embed_tokens.weight"
        return self.checkpoint.row_table(name) if self.tables.by_row else self._operand(name)

    def _head(self, embedding: Operand | RowTable) -> Head:
        config, name = self.checkpoint.config, "lm_head.weight"
        norm = Norm(self._norm("norm.weight"), config.rms_norm_eps)
        if self.tables.two_pass:
            room = self.memory.take(coded_bytes(config))
            return TwoPassHead.build(self.checkpoint.row_table(name), norm, self.runtime, room)
        if config.tie_word_embeddings and isinstance(embedding, Operand):
            return FullHead(embedding, norm)
        return FullHead(self._operand(name), norm)

    @property
    def _f32(self) -> bool:
        return self.precision is Precision.F32

    def _mixer(self, layer: int) -> _native.DeltaNet | _native.Attention:
        full = self.checkpoint.config.layer_types[layer] == "full_attention"
        return self._attention(f"layers.{layer}.") if full else self._delta_net(f"layers.{layer}.")

    def _attention(self, layer: str) -> _native.Attention:
        config, prefix = self.checkpoint.config, layer + "self_attn."
        return _native.Attention(
            q=self._matrix(prefix + "q_proj.weight"),
            k=self._matrix(prefix + "k_proj.weight"),
            v=self._matrix(prefix + "v_proj.weight"),
            o=self._matrix(prefix + "o_proj.weight"),
            norm_scale=self._norm(layer + "input_layernorm.weight").data_ptr(),
            q_scale=self._norm(prefix + "q_norm.weight").data_ptr(),
            k_scale=self._norm(prefix + "k_norm.weight").data_ptr(),
            eps=config.rms_norm_eps,
            hidden=config.hidden_size,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            rotary_dim=config.rotary_dim,
        )

    def _delta_net(self, layer: str) -> _native.DeltaNet:
        config, prefix = self.checkpoint.config, layer + "linear_attn."
        taps = self._vector(prefix + "conv1d.weight").squeeze(1).t().contiguous()
        return _native.DeltaNet(
            qkv=self._matrix(prefix + "in_proj_qkv.weight"),
            z=self._matrix(prefix + "in_proj_z.weight"),
            b=self._matrix(prefix + "in_proj_b.weight"),
            a=self._matrix(prefix + "in_proj_a.weight"),
            out=self._matrix(prefix + "out_proj.weight"),
            norm_scale=self._norm(layer + "input_layernorm.weight").data_ptr(),
            taps=self._keep(taps).data_ptr(),
            negative_rate=self._keep(-self._vector(prefix + "A_log").exp()).data_ptr(),
            dt_bias=self._keep(self._vector(prefix + "dt_bias")).data_ptr(),
            gated_scale=self._keep(self._vector(prefix + "norm.weight")).data_ptr(),
            eps=config.rms_norm_eps,
            hidden=config.hidden_size,
            key_heads=config.linear_num_key_heads,
            value_heads=config.linear_num_value_heads,
            dk=config.linear_key_head_dim,
            dv=config.linear_value_head_dim,
            kernel=config.linear_conv_kernel_dim,
        )

    def _layer(
        self, number: int, mixer: _native.DeltaNet | _native.Attention, table: ExpertTable
    ) -> CpuLayer:
        config, prefix = self.checkpoint.config, f"layers.{number}.mlp."
        router = _native.Router(
            router=self._matrix(prefix + "gate.weight"),
            shared_gate=self._matrix(prefix + "shared_expert_gate.weight"),
            norm_scale=self._norm(f"layers.{number}.post_attention_layernorm.weight").data_ptr(),
            eps=config.rms_norm_eps,
            hidden=config.hidden_size,
            experts=config.num_experts,
            top_k=config.num_experts_per_tok,
        )
        names = ("gate_proj", "up_proj", "down_proj")
        shared = [self._operand(f"{prefix}shared_expert.{name}.weight") for name in names]
        common_format(shared)
        experts = _native.ExpertLayer(
            experts=table.addresses(number).data_ptr(),
            format=table.format,
            hidden=config.hidden_size,
            inter=config.moe_intermediate_size,
            shared_gate=shared[0].matrix(),
            shared_up=shared[1].matrix(),
            shared_down=shared[2].matrix(),
        )
        return CpuLayer(mixer, router, experts)

    def _operand(self, name: str) -> Operand:
        operand = Operand.of(self.checkpoint.weight(name, self.memory.take), self._f32)
        self.alive.append(operand)
        return operand

    def _matrix(self, name: str) -> _native.Matrix:
        return self._operand(name).matrix()

    def _keep(self, tensor: Tensor) -> Tensor:
        self.alive.append(tensor)
        return tensor

    def _norm(self, name: str) -> Tensor:
        """scale f32 = 1 + w."""
        return self._keep(1.0 + self._vector(name))

    def _vector(self, name: str) -> Tensor:
        return self.checkpoint.tensor(name).float()
