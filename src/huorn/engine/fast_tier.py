"""How much of a model is in RAM: from --memory or --slots to a number of slots, with the budget that says what takes what."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path

from huorn.checkpoint.reader import Checkpoint
from huorn.engine.forecasting import Forecasting
from huorn.errors import UsageError
from huorn.experts.store import ExpertStore
from huorn.machine.limits import available_bytes
from huorn.memory import MemoryBudget, checkpoint_budget, format_bytes
from huorn.model.cpu_experts import MappedAdvice
from huorn.model.precision import Precision
from huorn.model.tables import LmHead


@dataclass(frozen=True)
class Residency:
    """What was asked for: --memory in bytes, or --slots as a share of all experts up to 1 or a number of them; or neither."""

    memory_bytes: int | None = None
    slots: float | None = None
    policy: str | None = None  # None: by forecasts where there are any, else DEFAULT_POLICY
    warm: Path | None = None
    mapped: MappedAdvice | None = None  # experts in mapped files: what the page cache makes of them
    forecasting: Forecasting = field(default_factory=Forecasting)
    link_bytes_s: float | None = None  # a slower link than the disk is, to try a balance with
    overlap: bool = True  # False: one lane, a copy at a time, nothing computed meanwhile; to compare with

    @property
    def asked(self) -> bool:
        """Whether the fast tier is limited by an option."""
        return self.memory_bytes is not None or self.slots is not None


@dataclass(frozen=True)
class FastTier:
    """The decision: how many slots (0: every expert is in RAM, or none with --mapped), and what everything takes."""

    slots: int
    budget: MemoryBudget
    store: ExpertStore | None = None  # what the slots are filled from
    remark: str | None = None  # what a user should know about it


def plan_fast_tier(
    checkpoint: Checkpoint,
    asked: Residency,
    context: int,
    precision: Precision,
    threads: int,
    lm_head: LmHead = "two-pass",
    predictor_bytes: int = 0,
) -> FastTier:
    """From headers alone: no tensor is read.

    Everything fits: all experts are resident, and no predictor is needed. Otherwise slots take what --memory leaves beside
    `predictor_bytes`, or as many as --slots says, or nine tenths of what this machine has free. UsageError, with the bytes it
    would take, when a model can not run in that.
    """
    config = checkpoint.config
    experts, top_k = config.num_hidden_layers * config.num_experts, config.num_experts_per_tok
    whole, free = checkpoint_budget(checkpoint, context, precision, True, threads, lm_head), available_bytes()
    needed = checkpoint_budget(checkpoint, context, precision, False, threads, lm_head)
    if predictor_bytes:
        needed = needed.and_line("expert predictor", predictor_bytes)
    fixed = needed.resident_bytes
    if precision is Precision.F32:
        return _all_in_f32(whole, asked, free)
    if asked.mapped is not None:
        return FastTier(0, needed)
    store = ExpertStore.of(checkpoint)
    slot_bytes = store.slot_bytes
    if asked.slots is not None:
        slots = _asked_slots(asked.slots, experts, top_k)
        total = fixed + slots * slot_bytes
        if total - needed.program_bytes > free:
            raise UsageError(
                f"{slots:,} slots need {format_bytes(total)} of memory in all and {format_bytes(free)} are free: give fewer "
                "--slots"
            )
    else:
        limit = asked.memory_bytes
        if limit is None:
            limit = free * 9 // 10 + needed.program_bytes
        elif limit - needed.program_bytes > free:
            raise UsageError(
                f"--memory is {format_bytes(limit)}, but this machine has {format_bytes(free + needed.program_bytes)} for this "
                "process: give no more than that"
            )
        if whole.resident_bytes <= limit:
            return FastTier(0, whole)
        slots = min(experts, (limit - fixed) // slot_bytes)
        if slots < top_k:
            least = fixed + top_k * slot_bytes
            raise UsageError(
                f"this model needs at least {format_bytes(least)} of memory with a context of {context} tokens, and "
                f"{format_bytes(limit)} are {'allowed' if asked.memory_bytes is not None else 'free'}: "
                f"{'raise --memory' if asked.memory_bytes is not None else 'free some'} or lower --context"
            )
    remark = None
    if slots < config.num_hidden_layers * top_k:
        cycle = config.num_hidden_layers * top_k
        remark = (
            f"warning: {slots:,} slots are fewer than the {cycle:,} experts that one token uses, so most are read from disk for "
            f"every token; {format_bytes(fixed + cycle * slot_bytes)} of memory would hold them"
        )
    return FastTier(
        slots, needed.and_line(f"{slots:,} slots for {experts:,} experts", slots * slot_bytes), store, remark
    )


def _all_in_f32(whole: MemoryBudget, asked: Residency, free: int) -> FastTier:
    """All weights expanded."""
    if asked.asked or asked.mapped is not None:
        raise UsageError(
            "--precision f32 expands all experts, so it goes with none of --memory, --slots and --mapped: use bf16"
        )
    if whole.resident_bytes - whole.program_bytes > free:
        need = format_bytes(whole.resident_bytes)
        raise UsageError(
            f"--precision f32 needs {need} for this model and {format_bytes(free)} are free: use bf16"
        )
    return FastTier(0, whole)


def _asked_slots(slots: float, experts: int, top_k: int) -> int:
    """--slots as a number, at least what one layer of one token uses."""
    count = round(slots * experts) if 0 < slots <= 1 else round(slots) if isfinite(slots) else 0
    if (slots > 1 and count != slots) or not top_k <= count <= experts:
        raise UsageError(
            f"--slots is {slots:g}, but it must be a share of all experts up to 1 (0.25), or a number of them from {top_k} to "
            f"{experts:,}"
        )
    return count
