"""What training reads of the model whose routing was recorded: its shape, its fingerprint and its embedding."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from huorn.assets import EMBEDDED_MODEL
from huorn.checkpoint.fingerprint import model_fingerprint
from huorn.checkpoint.reader import Checkpoint
from huorn.errors import UsageError
from huorn.predictor.bank_files.spec import BaseModelShape
from huorn.trace.manifest import Manifest


def recorded_model(manifest: Manifest, revision: str) -> BaseModelShape:
    """The model as a trace names it; without states it has hidden size 0 and no vocabulary."""
    model = manifest.model
    return BaseModelShape(
        repo=model.name, revision=revision, fingerprint=model.fingerprint or "", num_layers=model.layers,
        num_experts=model.experts, experts_per_token=model.top_k,
        hidden_size=(model.hidden or 0) if "hidden" in manifest.captured else 0, vocab_size=model.vocab or 0,
    )  # fmt: skip


def recorded_embedding(directory: Path | None, manifest: Manifest) -> Iterator[Tensor]:
    """Rows of the embedding of the model that was recorded, [n, D] after [n, D], each valid until the next; the embedded model's
    when `directory` is None.

    Raises CheckpointError; UsageError with both fingerprints when it is another model.
    """
    checkpoint = Checkpoint.open(directory or EMBEDDED_MODEL)
    found = model_fingerprint(checkpoint)
    if found != manifest.model.fingerprint:
        hint = "give --model DIR" if directory is None else "give the model that was recorded"
        raise UsageError(
            f"the traces are of {manifest.model.name} with fingerprint {manifest.model.fingerprint}, "
            f"{'the embedded model' if directory is None else directory} has {found}: {hint}"
        )
    return (piece for _, piece in checkpoint.row_table("embed_tokens.weight").pieces())
