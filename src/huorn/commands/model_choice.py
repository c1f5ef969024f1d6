"""Which model a command opens, and how."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from huorn.engine.session import Session
from huorn.memory import format_bytes
from huorn.model.backend import Backend
from huorn.model.precision import Precision
from huorn.model.tables import LmHead

PrecisionName = Literal["bf16", "f32"]


@dataclass(frozen=True)
class ModelChoice:
    """The options --model, --context, --threads, --precision, --backend and --lm-head."""

    directory: Path | None  # None: the embedded model
    context: int | None
    threads: int | None
    precision: PrecisionName
    backend: Backend
    lm_head: LmHead

    def open(self) -> Session:
        """Open the model. Raises UsageError, CheckpointError."""
        return Session.open(
            self.directory, self.context, self.threads, Precision(self.precision), self.backend, self.lm_head
        )


def describe(session: Session) -> dict[str, Any]:
    """Return what was opened, for a --json file; sizes in bytes."""
    kv, recurrent = session.state_bytes()
    return {
        "model": session.directory.name,
        "context": session.context,
        "kv_bytes": kv,
        "state_bytes": recurrent,
        "threads": session.threads,
        "backend": session.backend,
        "precision": session.decoder.precision.value,
        "lm_head": session.decoder.lm_head_kind,
    }


def context_cost(session: Session) -> str:
    """Return what the context costs, as in "context 4096 = 8.0 MiB KV + 1.2 MiB state"."""
    kv, recurrent = session.state_bytes()
    return f"context {session.context} = {format_bytes(kv)} KV + {format_bytes(recurrent)} state"
