"""Compares the tensors that files hold with the table of names.py, from headers only."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from huorn.checkpoint.config import ModelConfig
from huorn.checkpoint.fp8 import scale_shape
from huorn.checkpoint.names import F8, SCALE, SCALE_SUFFIX, Layout, TensorSpec, expected_tensors
from huorn.checkpoint.safetensors_file import TensorInfo
from huorn.errors import CheckpointError

_TEXT_PREFIXES = ("model.language_model.", "model.")
_MTP_PREFIXES = ("mtp.", "model.mtp.")
_VISION_PREFIXES = ("model.visual.", "visual.")

# Last part of a tensor name -> the quantisation scheme it betrays, whatever config.json says.
_SCHEME_OF_SUFFIX = {
    "weight_packed": "compressed-tensors (packed)",
    "weight_scale": "compressed-tensors (weight_scale)",
    "weight_scale_2": "NVFP4",
    "weight_global_scale": "NVFP4",
    "qweight": "GPTQ or AWQ",
    "qzeros": "GPTQ or AWQ",
    "g_idx": "GPTQ",
    "input_scale": "FP8 with static activation scales",
    "absmax": "bitsandbytes",
}


def kind_of(name: str) -> str:
    """`text`, `mtp` or `vision`: text tensors are used; the other two are known, counted and left alone."""
    if name.startswith(_MTP_PREFIXES):
        return "mtp"
    return "vision" if name.startswith(_VISION_PREFIXES) else "text"


def find_layout(names: Collection[str]) -> Layout:
    """Prefix and expert layout out of the names. Raises CheckpointError when they fit none known."""
    text = [name for name in names if kind_of(name) == "text"]
    for name in text:
        scheme = _SCHEME_OF_SUFFIX.get(name.rpartition(".")[2])
        if scheme is not None:
            raise CheckpointError(
                f"{name} belongs to the quantisation scheme {scheme}, which is not supported; "
                "huorn opens BF16, F32 and FP8 with weight_scale_inv"
            )
    found = [prefix for prefix in _TEXT_PREFIXES if prefix + "embed_tokens.weight" in names]
    if len(found) != 1:
        wanted = " or ".join(prefix + "embed_tokens.weight" for prefix in _TEXT_PREFIXES)
        raise CheckpointError(f"it must hold either {wanted}, but it holds {'both' if found else 'neither'}")
    fused = any(name.endswith(".mlp.experts.gate_up_proj") for name in text)
    return Layout(prefix=found[0], fused_experts=fused)


def tensor_problems(config: ModelConfig, layout: Layout, infos: Mapping[str, TensorInfo]) -> Iterator[str]:
    """One sentence per text tensor that is missing, unknown, or of another shape or dtype than it must be."""
    known: set[str] = set()
    for spec in _expected_on_disk(config, layout, infos):
        info = infos.get(spec.name)
        if info is None:
            yield f"{spec.name} {list(spec.shape)} is missing"
            continue
        known.add(spec.name)
        if info.shape != spec.shape:
            yield (
                f"{info.file.name}: {spec.name} has shape {list(info.shape)}, "
                f"but config.json asks for {list(spec.shape)}"
            )
        if info.dtype not in spec.dtypes:
            allowed = " or ".join(spec.dtypes)
            why = "" if info.dtype != F8 or config.fp8 else " (config.json has no quantization_config)"
            yield f"{info.file.name}: {spec.name} is {info.dtype}, but it must be {allowed}{why}"
    for name, info in infos.items():
        if name not in known and kind_of(name) == "text":
            yield f"{info.file.name}: {name} {info.dtype} {list(info.shape)} is no tensor of this model"


def _expected_on_disk(
    config: ModelConfig, layout: Layout, infos: Mapping[str, TensorInfo]
) -> Iterator[TensorSpec]:
    """The table with names as in the files, and the scales of those matrices that are stored in F8."""
    for spec in expected_tensors(config, layout):
        name = layout.on_disk(spec.name)
        yield TensorSpec(name, spec.shape, spec.dtypes)
        info = infos.get(name)
        if info is not None and info.dtype == F8 and F8 in spec.dtypes:
            yield TensorSpec(name + SCALE_SUFFIX, scale_shape(spec.shape), SCALE)
