"""A checkpoint folder, opened: every tensor checked by name, shape and dtype from headers, none read yet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from huorn.checkpoint.config import ModelConfig
from huorn.checkpoint.contents import read_contents
from huorn.checkpoint.names import F8, SCALE_SUFFIX, Layout
from huorn.checkpoint.row_table import RowTable
from huorn.checkpoint.safetensors_file import Advice, Allocate, SafetensorsFile, TensorInfo, fresh_memory
from huorn.checkpoint.tensor_check import kind_of
from huorn.checkpoint.weight import Weight
from huorn.errors import CheckpointError


@dataclass(frozen=True)
class ExpertWeights:
    """One routed expert as stored: gate and up [I, D], down [D, I]."""

    gate: Weight
    up: Weight
    down: Weight


class StoredPart(NamedTuple):
    """Where one matrix of an expert lies: bytes [start, start + nbytes) of `file`, in the dtype of tensor `name`."""

    name: str
    dtype: str
    file: Path
    start: int
    nbytes: int


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

    def advise(self, advice: Advice) -> None:
        """What the kernel is told about mappings of files that no view was taken of yet."""
        for file in self._files.values():
            file.advice = advice

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

    def read_ahead(self, layer: int, expert: int) -> None:
        """Has the kernel start to read a routed expert into its page cache; nobody waits."""
        for part in self.expert_parts(layer, expert):
            self._files[part.file].read_ahead(part.start, part.nbytes)

    def row_table(self, name: str) -> RowTable:
        """One matrix in F32 or BF16 whose rows are read when they are asked for. Raises CheckpointError when there is none."""
        info = self._info(name)
        self._used.add(info.name)
        return RowTable(self._files[info.file], info)

    def stored_dtype(self, name: str) -> str:
        """The dtype of a tensor as the file spells it. Raises CheckpointError when there is no such tensor."""
        return self._info(name).dtype

    def expert(self, layer: int, expert: int) -> ExpertWeights:
        """Routed expert of a layer as views of the mapped files. Its NaN codes are refused when it is expanded."""
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

    def expert_parts(self, layer: int, expert: int) -> tuple[StoredPart, StoredPart, StoredPart]:
        """Where gate, up and down of a routed expert lie. Nothing is read."""
        experts = f"layers.{layer}.mlp.experts."
        if not self.layout.fused_experts:
            gate, up, down = (
                self._info(f"{experts}{expert}.{name}.weight")
                for name in ("gate_proj", "up_proj", "down_proj")
            )
            return (
                _part(gate, gate.start, gate.nbytes),
                _part(up, up.start, up.nbytes),
                _part(down, down.start, down.nbytes),
            )
        both, down = self._info(experts + "gate_up_proj"), self._info(experts + "down_proj")
        half, whole = both.nbytes // (2 * self.config.num_experts), down.nbytes // self.config.num_experts
        return (
            _part(both, both.start + 2 * expert * half, half),
            _part(both, both.start + (2 * expert + 1) * half, half),
            _part(down, down.start + expert * whole, whole),
        )

    def expert_scales(self, layer: int, expert: int) -> list[Tensor]:
        """Block scales of gate, up and down of an expert in F8, each [ceil(O/128), ceil(I/128)] as stored; not looked at.

        Raises CheckpointError when one can not be read.
        """
        return [
            self._stored(part.name + SCALE_SUFFIX, copy=True) for part in self.expert_parts(layer, expert)
        ]

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
        return file.read(stored_name, allocate) if copy else file.view(stored_name)

    def _weight(self, name: str, copy: bool, allocate: Allocate = fresh_memory) -> Weight:
        info = self._info(name)
        scale = self._stored(info.name + SCALE_SUFFIX, copy) if info.dtype == F8 else None
        return Weight(self._stored(info.name, copy, allocate), scale, name=f"{info.file}: {info.name}")

    def _stored_expert(self, name: str, expert: int, allocate: Allocate | None = None) -> Weight:
        """One expert of a fused tensor: a view of the mapped file, or with `allocate` a copy."""
        info = self._info(name)
        file, experts = self._files[info.file], self.config.num_experts
        self._used.add(info.name)
        data = (
            file.view(info.name)[expert]
            if allocate is None
            else file.read(info.name, allocate, expert, experts)
        )
        return Weight(data, name=f"{info.file}: {info.name}[{expert}]")


def _part(info: TensorInfo, start: int, nbytes: int) -> StoredPart:
    return StoredPart(info.name, info.dtype, info.file, start, nbytes)


def _and_more(count: int) -> str:
    return f" (and {count - 1} more)" if count > 1 else ""
