"""A checkpoint folder, opened: every tensor checked by name, shape and dtype from headers, none read yet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from huorn.checkpoint.config import ModelConfig
from huorn.checkpoint.contents import read_contents
from huorn.checkpoint.names import F8, SCALE_SUFFIX, Layout
from huorn.checkpoint.row_table import RowTable
from huorn.checkpoint.safetensors_file import Allocate, SafetensorsFile, TensorInfo, fresh_memory
from huorn.checkpoint.tensor_check import kind_of
from huorn.checkpoint.weight import Weight
from huorn.errors import CheckpointError


@dataclass(frozen=True)
class ExpertWeights:
    """One routed expert as stored: gate and up [I, D], down [D, I]."""

    gate: Weight
    up: Weight
    down: Weight


class Checkpoint:
    """An open checkpoint; `Checkpoint.open` makes one.

    Names passed in are canonical: no prefix, but with suffix (`layers.3.self_attn.q_proj.weight`). `infos` is
    keyed by the names in the files. `config.tie_word_embeddings` says whether no lm_head.weight is stored;
    asking for it then gives the embedding.
    """

    def __init__(
        self,
        directory: Path,
        config: ModelConfig,
        layout: Layout,
        infos: Mapping[str, TensorInfo],
        files: Mapping[Path, SafetensorsFile],
    ) -> None:
        """Takes what `open` has checked."""
        self.directory = directory
        self.config = config
        self.layout = layout
        self.infos = infos
        self._files = files
        self._used: set[str] = set()

    @classmethod
    def open(cls, directory: Path) -> Checkpoint:
        """Reads config, index and headers (0.7 s for the 64,196 tensors of the 35B layout), no tensor.

        Raises CheckpointError when anything is missing, damaged, unknown, or of another shape, dtype or
        quantisation scheme.
        """
        contents = read_contents(directory)
        if contents.problems or contents.layout is None:
            raise CheckpointError(contents.problems[0] + _and_more(len(contents.problems)))
        files = {file.path: file for file in contents.files.values()}
        return cls(directory, contents.config, contents.layout, contents.infos, files)

    def tensor(self, name: str) -> Tensor:
        """One tensor copied into RAM: F32 or BF16 as stored, F8 expanded to F32. Raises CheckpointError as `weight` does."""
        weight = self.weight(name)
        return weight.data if weight.scale_inv is None else weight.expand()

    def weight(self, name: str, allocate: Allocate = fresh_memory) -> Weight:
        """One matrix [O, I] as stored, copied into memory from `allocate`, with its scales.

        Raises CheckpointError when it can not be read, holds NaN or infinity, or a negative scale.
        """
        weight = self._weight(name, copy=True, allocate=allocate)
        weight.refuse_damaged()
        return weight

    def row_table(self, name: str) -> RowTable:
        """One matrix in F32 or BF16 whose rows are read when they are asked for. Raises CheckpointError when there is none."""
        info = self._info(name)
        self._used.add(info.name)
        return RowTable(self._files[info.file], info)

    def stored_dtype(self, name: str) -> str:
        """The dtype of a tensor as the file spells it. Raises CheckpointError when there is no such tensor."""
        return self._info(name).dtype

    def expert(self, layer: int, expert: int) -> ExpertWeights:
        """Routed expert of a layer as views of the mapped files. The kernel starts to read it; nobody waits.

        Its NaN codes are refused when it is expanded.
        """
        experts = f"layers.{layer}.mlp.experts."
        if self.layout.fused_experts:
            gate_up = self._stored_expert(experts + "gate_up_proj", expert)  # [2I, D]
            down = self._stored_expert(experts + "down_proj", expert)
            width = self.config.moe_intermediate_size
            return ExpertWeights(
                gate=Weight(gate_up.data[:width], name=gate_up.name),
                up=Weight(gate_up.data[width:], name=gate_up.name),
                down=down,
            )
        return ExpertWeights(
            gate=self._weight(f"{experts}{expert}.gate_proj.weight", copy=False),
            up=self._weight(f"{experts}{expert}.up_proj.weight", copy=False),
            down=self._weight(f"{experts}{expert}.down_proj.weight", copy=False),
        )

    def read_expert(self, layer: int, expert: int, allocate: Allocate) -> ExpertWeights:
        """Routed expert of a layer, copied into memory from `allocate`, scales apart.

        Raises CheckpointError when it can not be read, holds a NaN code or a scale that is not finite.
        """
        experts = f"layers.{layer}.mlp.experts."
        if self.layout.fused_experts:
            gate_up = self._stored_expert(experts + "gate_up_proj", expert, allocate)
            width = self.config.moe_intermediate_size
            return ExpertWeights(
                gate=Weight(gate_up.data[:width], name=gate_up.name),
                up=Weight(gate_up.data[width:], name=gate_up.name),
                down=self._stored_expert(experts + "down_proj", expert, allocate),
            )
        gate, up, down = (
            self.weight(f"{experts}{expert}.{name}.weight", allocate)
            for name in ("gate_proj", "up_proj", "down_proj")
        )
        return ExpertWeights(gate, up, down)

    def assert_text_tensors_used(self) -> None:
        """Raises CheckpointError when a text tensor that is no routed expert was never read."""
        unused = [
            name
            for name in self.infos
            if name not in self._used and ".mlp.experts." not in name and kind_of(name) == "text"
        ]
        if unused:
            raise CheckpointError(f"{self.directory}: {unused[0]} was never used{_and_more(len(unused))}")

    def ignored(self) -> Counter[str]:
        """Tensors that are known and not used, counted by kind (`mtp`, `vision`)."""
        return Counter(kind for name in self.infos if (kind := kind_of(name)) != "text")

    def _info(self, name: str) -> TensorInfo:
        if name == "lm_head.weight" and self.config.tie_word_embeddings:
            name = "embed_tokens.weight"
        info = self.infos.get(self.layout.on_disk(name))
        if info is None:
            raise CheckpointError(f"{self.directory} has no tensor {self.layout.on_disk(name)}")
        return info

    def _stored(self, stored_name: str, copy: bool, allocate: Allocate = fresh_memory) -> Tensor:
        info = self.infos[stored_name]
        file = self._files[info.file]
        self._used.add(stored_name)
        if copy:
            return file.read(stored_name, allocate)
        file.read_ahead(info.start, info.nbytes)
        return file.view(stored_name)

    def _weight(self, name: str, copy: bool, allocate: Allocate = fresh_memory) -> Weight:
        info = self._info(name)
        scale = self._stored(info.name + SCALE_SUFFIX, copy) if info.dtype == F8 else None
        return Weight(self._stored(info.name, copy, allocate), scale, name=f"{info.file}: {info.name}")

    def _stored_expert(self, name: str, expert: int, allocate: Allocate | None = None) -> Weight:
        """One expert of a fused tensor: a view of the mapped file, or with `allocate` a copy."""
        info = self._info(name)
        file, experts = self._files[info.file], self.config.num_experts
        self._used.add(info.name)
        if allocate is not None:
            data = file.read(info.name, allocate, expert, experts)
        else:
            nbytes = info.nbytes // experts
            file.read_ahead(info.start + expert * nbytes, nbytes)
            data = file.view(info.name)[expert]
        return Weight(data, name=f"{info.file}: {info.name}[{expert}]")


def _and_more(count: int) -> str:
    return f" (and {count - 1} more)" if count > 1 else ""
