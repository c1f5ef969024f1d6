"""Reads an expert-predictor bank from its folder, and makes the int8 bank that engines serve. Data only: nothing is executed."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from int8_bank import quantise
from reference_scorer import Bank
from spec import SCHEMA, BankConfig

CONFIG, MODEL = "config.json", "model.safetensors"


def load(folder: str | Path) -> tuple[BankConfig, Bank]:
    """(config, bank) of a folder. ValueError when the schema is unknown or a tensor is not what config.json says; OSError."""
    path = Path(folder)
    value = json.loads((path / CONFIG).read_text(encoding="utf-8"))
    schema = value.get("schema") if isinstance(value, dict) else None
    if schema != SCHEMA:
        raise ValueError(f"{path / CONFIG} has the schema {schema!r}, but this loader reads {SCHEMA!r}")
    config = BankConfig.model_validate(value)
    with safe_open(path / MODEL, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping
    check_tensors(config, tensors, str(path / MODEL))
    return config, Bank(config, tensors)


def tensor_shapes(config: BankConfig) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Name -> (shape, dtype) of every tensor of a bank."""
    base, heads = config.base_model, config.heads
    count, groups, trunk = len(heads.layers), len(heads.horizons), heads.trunk
    out, low, full = groups * base.num_experts + base.hidden_size, torch.bfloat16, torch.float32
    return {
        "w_in": ((count, trunk, config.features.width(base)), low), "b_in": ((count, trunk), low),
        "w_out": ((count, out, trunk), low), "b_out": ((count, out), low),
        "w_router": ((count, base.num_experts, base.hidden_size), low), "b_router": ((count, base.num_experts), low),
        "token_table": ((config.features.token_rows, config.features.token_width), low),
        "a": ((count, groups), full), "b": ((count, groups), full),
    }  # fmt: skip


def check_tensors(config: BankConfig, tensors: dict[str, Tensor], where: str) -> None:
    """ValueError naming the first tensor that is missing, too many, of another shape or dtype, or not finite."""
    wanted = tensor_shapes(config)
    for name in sorted(wanted.keys() ^ tensors.keys()):
        raise ValueError(f"{where} {'lacks' if name in wanted else 'has an unknown'} tensor {name}")
    for name, (shape, dtype) in wanted.items():
        have = tensors[name]
        if tuple(have.shape) != shape or have.dtype != dtype:
            raise ValueError(
                f"{where}: {name} is {tuple(have.shape)} {have.dtype}, but config.json says {shape} {dtype}"
            )
        if not bool(have.isfinite().all()):
            raise ValueError(f"{where}: {name} holds NaN or infinity")


def to_int8(bank: Bank) -> dict[str, Tensor]:
    """The int8 bank: codes int8 and scale f32 of each weight matrix, in groups of 128 along its inputs, which are padded with
    zeros; biases and calibration f32."""
    found: dict[str, Tensor] = {}
    for name in ("w_in", "w_out", "w_router"):
        found[f"{name}.codes"], found[f"{name}.scale"] = quantise(bank.tensors[name])
    for name in ("b_in", "b_out", "b_router", "a", "b"):
        found[name] = bank.tensors[name].float()
    return found
