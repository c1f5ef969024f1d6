"""From a training run to a bank, and back from a released folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from huorn import __version__
from huorn.errors import UsageError
from huorn.predictor.bank_files.reference_scorer import Bank
from huorn.predictor.bank_files.spec import SCHEMA, BankConfig, BaseModelShape, HeadShape, Provenance
from huorn.predictor.run_folder import (
    WEIGHTS,
    RunSpec,
    head_folder,
    read_run,
    read_tensors,
    read_token_table,
    trained_layers,
)

Heads = Mapping[str, Tensor]  # F32 tensors of all heads, stacked
_OF_A_HEAD = {"w_in", "b_in", "w_out", "b_out", "w_router", "b_router", "a", "b"}


def read_heads(run: Path, layers: Sequence[int], spec: RunSpec) -> Heads:
    """F32 tensors [H, ...] of finished heads. UsageError when one is missing or of another run."""
    parts = []
    for layer in layers:
        path = head_folder(run, layer) / WEIGHTS
        tensors, metadata = read_tensors(path)
        if metadata.get("run") != spec.digest or metadata.get("layer") != str(layer):
            raise UsageError(
                f"{path} is of another run or layer than its folder says: delete it and train it anew"
            )
        if tensors.keys() != _OF_A_HEAD or not all(
            bool(tensor.isfinite().all()) for tensor in tensors.values()
        ):
            raise UsageError(f"{path} is damaged: delete it and train it anew")
        parts.append(tensors)
    return {name: torch.stack([part[name] for part in parts]) for name in parts[0]}


def bank_from_run(run: Path, base: BaseModelShape | None = None) -> tuple[Bank, Heads]:
    """The BF16 bank of all finished heads of a run, and their F32 tensors. `base` names repository and revision, where they are
    known. UsageError when the run is damaged or has no finished head."""
    spec = read_run(run)
    layers = [layer for layer in trained_layers(run) if layer < spec.base_model.num_layers]
    if not layers:
        raise UsageError(f"{run} has no finished head: run huorn predictor train to its end")
    heads = read_heads(run, layers, spec)
    settings = spec.settings
    config = BankConfig.model_validate(
        {
            "schema": SCHEMA,
            "base_model": base or spec.base_model,
            "features": spec.features,
            "heads": HeadShape(layers=tuple(layers), trunk=settings.trunk, horizons=settings.horizons),
            "provenance": Provenance(
                traces=spec.traces,
                run=spec.digest,
                huorn=__version__,
                torch=torch.__version__,
                training=settings.model_dump(exclude={"horizons", "trunk"}),
            ),
        }
    )
    tensors = {name: heads[name].to(torch.bfloat16) for name in heads if name not in ("a", "b")}
    tensors |= {name: heads[name].float() for name in ("a", "b")}
    tensors["token_table"] = read_token_table(run)
    return Bank(config, tensors), heads
