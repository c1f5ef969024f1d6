"""Which model a command opens, and how."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TextIO

from rich.console import Console
from rich.table import Table

from huorn.commands.output import note
from huorn.engine.fast_tier import FastTier, Residency
from huorn.engine.forecasting import OFF, Forecasting
from huorn.engine.session import Session
from huorn.errors import UsageError
from huorn.experts.policy import BY_FORECAST, check_policy
from huorn.memory import format_bytes
from huorn.model.backend import Backend
from huorn.model.cpu_experts import MappedAdvice
from huorn.model.precision import Precision
from huorn.model.tables import LmHead
from huorn.sizes import parse_bytes

PrecisionName = Literal["bf16", "f32"]


@dataclass(frozen=True)
class ModelChoice:
    """The options --model, --context, --threads, --precision, --backend and --lm-head, and those of the fast tier."""

    directory: Path | None  # None: the embedded model
    context: int | None
    threads: int | None
    precision: PrecisionName
    backend: Backend
    lm_head: LmHead
    residency: Residency

    def open(self) -> Session:
        """Open the model, and show what takes memory when that was limited. Raises UsageError, CheckpointError."""
        session = Session.open(
            self.directory,
            self.context,
            self.threads,
            Precision(self.precision),
            self.backend,
            self.lm_head,
            self.residency,
        )
        if session.tier is not None and session.cache is not None:
            show_budget(session.tier, sys.stderr)
        for remark in session.remarks:
            note(remark)
        return session


def residency(
    memory: str | None,
    slots: float | None,
    policy: str | None,
    warm: Path | None,
    mapped: MappedAdvice | None = None,
    forecasting: Forecasting | None = None,
) -> Residency:
    """The options --memory, --slots, --policy, --warm and --mapped, and those of forecasts (None: there are none). Raises
    UsageError."""
    if memory is not None and slots is not None:
        raise UsageError("--memory and --slots both say how much is in RAM: give one of them")
    if mapped is not None and (memory is not None or slots is not None):
        raise UsageError(
            "--mapped leaves experts to the page cache: it goes with neither --memory nor --slots"
        )
    if policy not in (None, BY_FORECAST):
        check_policy(policy)
    limit = None if memory is None else parse_bytes(memory, "--memory")
    forecasting = forecasting or Forecasting(OFF)
    forecasting.check()
    return Residency(limit, slots, policy, warm, mapped, forecasting)


def show_budget(tier: FastTier, file: TextIO) -> None:
    """Print what takes how much memory as a table."""
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_column()
    for row in tier.budget.rows():
        table.add_row(*row)
    Console(file=file).print(table, markup=False)


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
