"""What the native kernels can not take is refused by name, never multiplied as something else."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from huorn import _native
from huorn.assets import EMBEDDED_MODEL
from huorn.checkpoint.reader import Checkpoint
from huorn.errors import CheckpointError
from huorn.kernels import isa
from huorn.model.cpu_experts import MappedTable
from huorn.model.cpu_load import load_cpu_decoder
from huorn.model.load import load_decoder
from huorn.model.precision import Precision
from huorn.model.state import DecodeState


def with_bf16(part: str, folder: Path) -> tuple[Path, str]:
    """seedling with the one weight whose name ends in `part` stored in BF16, and that weight's name."""
    shutil.copytree(EMBEDDED_MODEL, folder)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    (name,) = [name for name in tensors if name.endswith(part)]
    scale = tensors.pop(name + "_scale_inv").float()
    codes = tensors[name].float()
    rows, cols = codes.shape
    spread = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[:rows, :cols]
    tensors[name] = (codes * spread).bfloat16()
    save_file(tensors, path, metadata={"format": "pt"})
    return folder, name


def runtime() -> _native.Runtime:
    return _native.Runtime(1, isa.chosen())


@pytest.mark.parametrize(
    "part", ["layers.3.mlp.experts.5.up_proj.weight", "layers.2.mlp.shared_expert.up_proj.weight"]
)
def test_a_weight_of_another_dtype_is_refused_by_name(part: str, tmp_path: Path) -> None:
    folder, name = with_bf16(part, tmp_path / "mixed")
    with pytest.raises(CheckpointError, match="use --backend reference") as refused:
        load_cpu_decoder(Checkpoint.open(folder), Precision.BF16, runtime())
    assert name in str(refused.value)
    assert "bfloat16" in str(refused.value)
    reference = load_decoder(Checkpoint.open(folder), Precision.BF16)
    logits = reference.forward(torch.tensor([5, 6]), DecodeState.new(reference.config, 8, Precision.BF16))
    assert torch.isfinite(logits).all()


def test_a_mapped_expert_of_another_dtype_is_refused_when_it_is_routed_to(tmp_path: Path) -> None:
    folder, name = with_bf16("layers.3.mlp.experts.5.up_proj.weight", tmp_path / "mixed")
    table = MappedTable(Checkpoint.open(folder))
    assert list(table.waves(3, np.array([[4]], dtype=np.int32))) == [[4]]
    with pytest.raises(CheckpointError) as refused:
        list(table.waves(3, np.array([[5]], dtype=np.int32)))
    assert name in str(refused.value)


def test_in_f32_every_weight_is_of_one_dtype(tmp_path: Path) -> None:
    folder, _ = with_bf16("layers.3.mlp.experts.5.up_proj.weight", tmp_path / "mixed")
    ids = torch.tensor([5, 6, 7])
    native = load_cpu_decoder(Checkpoint.open(folder), Precision.F32, runtime())
    reference = load_decoder(Checkpoint.open(folder), Precision.F32)
    mine, theirs = (
        decoder.forward(ids, DecodeState.new(decoder.config, 8, Precision.F32))
        for decoder in (native, reference)
    )
    assert (mine - theirs).norm() / theirs.norm() < 2e-5
