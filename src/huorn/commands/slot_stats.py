"""What slots and forecasts did in one session, for people and for --json."""

from __future__ import annotations

from dataclasses import dataclass

from huorn.engine.session import Session
from huorn.memory import format_bytes


@dataclass(frozen=True)
class SlotStats:
    """Since the session was opened, prompts included. A lookup is one distinct expert of one layer call."""

    slots: int
    lookups: int
    hits: int
    late_hits: int  # found while a copy ahead was under way
    misses: int
    disk_bytes: int
    wait_s: float
    copies_ahead: int
    copies_ahead_used: int
    forecast_s: float
    forecast_log: tuple[str, ...]

    @classmethod
    def of(cls, session: Session) -> SlotStats | None:
        """None where no experts are in slots."""
        if session.cache is None:
            return None
        counts, ahead = session.cache.counts, session.cache.brought.counts
        control = None if session.forecaster is None else session.forecaster.control
        return cls(
            session.cache.slots.count, counts.lookups, counts.hits, counts.loading_hits, counts.misses,
            session.cache.reader.bytes_read, counts.wait_s, ahead.begun, ahead.used,
            0.0 if control is None else control.spent_s, () if control is None else tuple(control.log),
        )  # fmt: skip

    def lines(self) -> list[str]:
        """For stderr: what was found, what forecasts did, and what was decided about them."""
        share = 100 * self.hits / self.lookups if self.lookups else 0.0
        found = [
            f"{share:.1f} % of {self.lookups:,} experts were in one of {self.slots:,} slots, "
            f"{format_bytes(self.disk_bytes)} came from disk, {self.wait_s:.2f} s of waiting"
        ]
        if self.forecast_s:
            used = f", {self.copies_ahead_used:,} of them used" if self.copies_ahead else ""
            found.append(
                f"forecasts: {self.copies_ahead:,} copies ahead{used}, {self.forecast_s:.2f} s of scoring"
            )
        return [*found, *self.forecast_log]
