"""What a user says of forecasts, and the bank that this means for a model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from huorn.errors import UsageError
from huorn.experts.prefetch import DEFAULT_CAPS, THRESHOLD, parse_caps
from huorn.predictor.bank_files.bank_loader import CONFIG

AUTO, OFF = "auto", "off"


@dataclass(frozen=True)
class Forecasting:
    """--predictor BANK, auto or off; --prefetch as experts/prefetch.py reads it; --lookahead.

    `fixed` copies ahead per token at most in place of what the control finds worth it, and no pause; for measurements.
    """

    predictor: str = AUTO
    caps: str = DEFAULT_CAPS
    threshold: float = THRESHOLD
    lookahead: bool = False
    fixed: int | None = None

    def check(self) -> None:
        """UsageError when an option can not be understood."""
        parse_caps(self.caps, 1, 0)
        if self.predictor not in (AUTO, OFF) and not Path(self.predictor).is_dir():
            raise UsageError(
                f"--predictor {self.predictor} is no folder: give that of a bank, or {AUTO}, or {OFF}"
            )

    def bank_of(self, model: Path) -> Path | None:
        """The bank to use: the one that was named, or with auto MODEL/bank or MODEL_bank, if there is one."""
        if self.predictor == OFF:
            return None
        if self.predictor != AUTO:
            return Path(self.predictor)
        resolved = model.resolve()
        beside = (resolved / "bank", resolved.with_name(f"{resolved.name}_bank"))
        return next((folder for folder in beside if (folder / CONFIG).is_file()), None)
