"""A released bank, and the shape of a model that it may be for. What the engine needs, so nothing of traces is imported here."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError
from safetensors import SafetensorError

from huorn.checkpoint.fingerprint import model_fingerprint
from huorn.checkpoint.reader import Checkpoint
from huorn.errors import UsageError, first_problem, reason
from huorn.predictor.bank_files.bank_loader import CONFIG, MODEL, load
from huorn.predictor.bank_files.reference_scorer import Bank
from huorn.predictor.bank_files.spec import BaseModelShape


def base_model_shape(checkpoint: Checkpoint, name: str, revision: str) -> BaseModelShape:
    """Of an opened checkpoint. Raises CheckpointError."""
    config = checkpoint.config
    return BaseModelShape(
        repo=name, revision=revision, fingerprint=model_fingerprint(checkpoint), num_layers=config.num_hidden_layers,
        num_experts=config.num_experts, experts_per_token=config.num_experts_per_tok, hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
    )  # fmt: skip


def open_bank(folder: Path) -> Bank:
    """A released bank, read as data by huorn's own loader. UsageError when it is missing, damaged or of another schema."""
    for name in (CONFIG, MODEL):
        if (folder / name).exists() and not (folder / name).is_file():
            raise UsageError(f"{folder / name} is no regular file, so {folder} is no expert-predictor bank")
    try:
        return load(folder)[1]
    except (OSError, SafetensorError) as error:
        raise UsageError(f"{folder} is no expert-predictor bank: {reason(error)}") from error
    except ValidationError as error:
        raise UsageError(f"{folder / CONFIG} is damaged: {first_problem(error)}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{folder} is damaged or of another kind: {str(error).splitlines()[0]}") from error
