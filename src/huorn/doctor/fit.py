"""Which models would run in the RAM that is there: the embedded one, and the 35B shape as an example of a large one."""

from __future__ import annotations

from dataclasses import dataclass

from huorn.assets import EMBEDDED_MODEL
from huorn.checkpoint.reader import Checkpoint
from huorn.memory import MemoryBudget, checkpoint_budget, format_bytes, memory_budget, resident_set_bytes
from huorn.model.precision import Precision
from huorn.model.tables import Tables
from huorn.synth.presets import find_preset
from huorn.synth.tensors import text_tensors


@dataclass(frozen=True)
class ModelFit:
    """Whether one model runs in `available_bytes` of RAM."""

    name: str
    resident_bytes: int
    mapped_bytes: int  # experts that are read from disk when they are used
    available_bytes: int
    fits: bool

    def sentence(self) -> str:
        """One line for a person."""
        need = f"{format_bytes(self.resident_bytes)} must stay in RAM"
        if not self.fits:
            return f"does not fit: {need}, {format_bytes(self.available_bytes)} are available"
        mapped = (
            f", {format_bytes(self.mapped_bytes)} of experts are read from disk" if self.mapped_bytes else ""
        )
        return f"fits: {need}{mapped}"


def model_fits(available_bytes: int, context: int) -> tuple[ModelFit, ...]:
    """The models of this file with `context` tokens of keys and values each; the embedded one only where it is installed."""
    budgets = {}
    if (EMBEDDED_MODEL / "config.json").exists():
        budgets["seedling (embedded)"] = checkpoint_budget(
            Checkpoint.open(EMBEDDED_MODEL), context, Precision.BF16, resident=True
        )
    config = find_preset("qwen3.5-35b-a3b-fp8").config
    tables = Tables(config, two_pass=True, by_row=True)
    sizes = {tensor.name: tables.held_bytes(tensor.name, tensor.nbytes) for tensor in text_tensors(config)}
    budgets["Qwen3.5-35B-A3B FP8"] = memory_budget(
        sizes, config, context, Precision.BF16, resident_set_bytes()
    )
    return tuple(_fit(name, budget, available_bytes) for name, budget in budgets.items())


def _fit(name: str, budget: MemoryBudget, available_bytes: int) -> ModelFit:
    resident = budget.resident_bytes
    # What Python and PyTorch hold is counted in the budget but is no longer part of what is available.
    fits = resident - budget.program_bytes <= available_bytes
    return ModelFit(name, resident, budget.mapped_bytes, available_bytes, fits)
