"""Whether forecasts pay: how many copies ahead a token may start, and when a bank is left alone for a while.

For some tokens now and then it is counted what they save: misses that the best policy without forecasts would have had
(GhostCache) less those that were left, times what a miss costs, which is the slope of tokens' times over their misses; and what
they cost: the time that went into them, but for starting copies that were used, which would have been started later without them.
A bank that saves less than it costs, or names fewer of the experts that come than repeating the last token's would, is left
alone, then tried again.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from huorn.experts.cache import ExpertCache

# Forecasts before a bank is judged by what it names; one that names less than half of what repeating does is judged after each.
FIRST_LOOK = 4
SETTLING = 24  # tokens before that in which a moving average of 0.9 comes about
WINDOW = 32  # tokens of which savings are counted
BETWEEN = 256  # tokens from one window to the next while forecasts pay
FIRST_PAUSE, LONGEST_PAUSE = 64, 1024  # tokens that a bank is left alone
FIRST_MOST = 8  # copies ahead per token at the start
REMEMBERED = 64  # tokens that say what a miss costs
EVERY = 8  # tokens after which the number of copies follows what became of them
# Shares of copies ahead that were used: twice as many copies above the first, half as many below the second.
MOST_USED, FEW_USED = 0.3, 0.1


def copies_in_idle_time(seconds: float, demand_bytes: float, bandwidth: float, expert_bytes: int) -> float:
    """Copies that the disk can do beside demand copies in so many seconds: (seconds * bandwidth - demand) / expert."""
    return max(0.0, seconds * bandwidth - demand_bytes) / expert_bytes


@dataclass(frozen=True)
class _Counts:
    """Of the cache and the clock, at one moment."""

    time: float
    begun: int
    used: int
    misses: int
    late: int
    wait_s: float
    read_bytes: int
    busy_s: float
    spent_s: float
    begin_s: float


class MissCost:
    """Seconds that one more miss adds to a token: the slope of a line through (misses, time) of tokens, older ones counting
    less."""

    def __init__(self) -> None:
        self._sums = np.zeros(5)  # of 1, x, y, x x, x y

    def add(self, misses: float, seconds: float) -> None:
        """One token."""
        new = np.array([1.0, misses, seconds, misses * misses, misses * seconds])
        self._sums = (1 - 1 / REMEMBERED) * self._sums + new

    @property
    def seconds(self) -> float:
        """0 where tokens say nothing: too few, or all with as many misses."""
        n, x, y, xx, xy = self._sums.tolist()
        spread = n * xx - x * x
        return max(0.0, (n * xy - x * y) / spread) if n > 8 and spread > 1e-6 * n * n else 0.0


@dataclass(eq=False)
class ForecastControl:
    """Told of every decode step. `fixed` copies ahead per token, whatever they bring, are for measurements."""

    cache: ExpertCache
    expert_bytes: int
    fixed: int | None = None
    log: list[str] = field(default_factory=list)
    spent_s: float = 0.0
    tokens: int = 0

    def __post_init__(self) -> None:
        self._most = float(FIRST_MOST)
        self._pause, self._resting = FIRST_PAUSE, 0
        self._named = self._repeated = 0.0
        self._looks = 0
        self._window: _Counts | None = None  # where the one at hand began
        self._until_window = 0
        self._last: _Counts | None = None
        self._miss_cost, self._then = MissCost(), (0, 0.0)

    @property
    def uses_forecasts(self) -> bool:
        """Whether forecasts move anything now."""
        return self._resting == 0

    @property
    def wants_forecast(self) -> bool:
        """Whether the next token's should be made: while they are used, and to see whether they would be right."""
        return self._resting <= FIRST_LOOK

    @property
    def follows(self) -> bool:
        """Whether what layers route matters now: for a forecast, or for the moving average of one that is to come."""
        return self._resting <= FIRST_LOOK + SETTLING

    @property
    def most(self) -> int:
        """Copies ahead for the next token."""
        if self.cache.prefetch is None:
            return 0
        return int(self._most) if self.fixed is None else self.fixed

    def spend(self, seconds: float) -> None:
        """Time went into forecasts."""
        self.spent_s += seconds

    def ended(
        self,
        now: float,
        said: NDArray[np.float32] | None = None,
        last: NDArray[np.int32] | None = None,
        came: NDArray[np.int32] | None = None,
    ) -> None:
        """A decode step is over at `now` (time.perf_counter()): `said` f32 [H, E] was forecast, if anything was; the token before
        used `last` i32 [H, K], this one `came`."""
        self.tokens += 1
        if self.fixed is not None:
            return
        misses, then = self.cache.counts.misses, self._then
        self._then = misses, now
        if then[1]:
            self._miss_cost.add(misses - then[0], now - then[1])
        if said is not None and last is not None and came is not None and self._looks < FIRST_LOOK:
            self._looks += 1
            self._named += _share_named(said, came)
            self._repeated += float((came[:, :, None] == last[:, None, :]).any(2).mean())
        if self._resting:
            self._rest_on()
        elif self._looks and self._named <= (1.0 if self._looks == FIRST_LOOK else 0.5) * self._repeated:
            self._rest(
                f"forecasts named {100 * self._named / self._looks:.0f} % of the experts that came, the last token's "
                f"were {100 * self._repeated / self._looks:.0f} %"
            )
        else:
            self._weigh(now)
            if self.tokens % EVERY == 0 and not self._resting:
                self._set_most(now)

    def _weigh(self, now: float) -> None:
        """Opens a window when it is time for one; closes it with a decision."""
        self._until_window -= 1
        if self._window is None and self._until_window <= 0:
            self._window, self._until_window = self._counts(now), WINDOW
            self.cache.start_ghost()
        elif self._window is not None and self._until_window <= 0:
            before, after = self._window, self._counts(now)
            self._window, self._until_window = None, BETWEEN
            saved, cost = self._saved(before, after), self._cost(before, after)
            if saved < cost:
                self._rest(f"forecasts saved about {1e3 * saved:.2f} ms a token and cost {1e3 * cost:.2f}")
            else:
                self._pause = FIRST_PAUSE

    def _saved(self, before: _Counts, after: _Counts) -> float:
        """Seconds per token of the window: misses less than without forecasts, times what one costs, at least its wait."""
        ghost = self.cache.end_ghost()
        misses, late = after.misses - before.misses, after.late - before.late
        read = after.read_bytes - before.read_bytes
        copy_s = self.expert_bytes * (after.busy_s - before.busy_s) / read if read else 0.0
        wait_s = (after.wait_s - before.wait_s) / (misses + late) if misses + late else copy_s / 2
        return (ghost - misses - late / 2) * max(wait_s, self._miss_cost.seconds) / WINDOW

    def _cost(self, before: _Counts, after: _Counts) -> float:
        """Seconds per token of the window."""
        begun, used = after.begun - before.begun, after.used - before.used
        in_vain = 1 - used / begun if begun else 0.0
        begin_s = after.begin_s - before.begin_s
        return (after.spent_s - before.spent_s - (1 - in_vain) * begin_s) / WINDOW

    def _set_most(self, now: float) -> None:
        """Never more copies than the disk can do beside demand copies."""
        before, after = self._last, self._counts(now)
        self._last = after
        if before is None:
            return
        begun, used = after.begun - before.begun, after.used - before.used
        if begun:
            share = used / begun
            self._most *= 2 if share > MOST_USED else 0.5 if share < FEW_USED else 1
        busy_s, read = after.busy_s - before.busy_s, after.read_bytes - before.read_bytes
        if busy_s:
            demand = (after.misses - before.misses) * self.expert_bytes
            idle = copies_in_idle_time(after.time - before.time, demand, read / busy_s, self.expert_bytes)
            self._most = min(self._most, idle / EVERY)
        self._most = max(1.0, self._most)

    def _rest_on(self) -> None:
        """One token less to rest; a new look at the end decides whether it was enough."""
        self._resting -= 1
        if self._resting == FIRST_LOOK:
            self._named, self._repeated, self._looks = 0.0, 0.0, 0
        if self._resting == 0:
            if self._looks < FIRST_LOOK or self._named <= self._repeated:
                self._rest(None)
            else:
                self._most, self._until_window, self._last = float(FIRST_MOST), 0, None
                self._say("forecasts are used again")

    def give_up(self, why: str) -> None:
        """No forecast can be made any more."""
        self._rest(None)
        self._resting = sys.maxsize
        self._say(f"{why}: no more forecasts")

    def _rest(self, why: str | None) -> None:
        if why is not None:
            self._say(f"{why}: they are left alone for {self._pause} tokens")
        self._window = None
        self.cache.end_ghost()
        self._resting, self._pause = self._pause, min(2 * self._pause, LONGEST_PAUSE)

    def _say(self, what: str) -> None:
        self.log.append(f"after {self.tokens} tokens {what}")

    def _counts(self, now: float) -> _Counts:
        cache, brought = self.cache, self.cache.brought.counts
        return _Counts(
            now, brought.begun, brought.used, cache.counts.misses, cache.counts.loading_hits, cache.counts.wait_s,
            cache.reader.bytes_read, cache.reader.busy_s, self.spent_s, brought.begin_s,
        )  # fmt: skip


def _share_named(said: NDArray[np.float32], came: NDArray[np.int32]) -> float:
    """Of the experts came i32 [H, K] the share among the K likeliest of said f32 [H, E]."""
    count = came.shape[1]
    least = np.partition(said, -count, axis=1)[:, -count]
    return float((np.take_along_axis(said, came.astype(np.int64), 1) >= least[:, None]).mean())
