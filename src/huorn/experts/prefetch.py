"""Which experts are copied before their layer asks, and what became of them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from huorn.errors import UsageError

# From this probability of use on a copy ahead pays: replay of seedling's test texts has its least misses at 110 % of LRU's loads
# between 0.1 and 0.2.
THRESHOLD = 0.15
DEFAULT_CAPS = "3"
# The published bank's: more for late layers, whose copies have more time.
PRESETS = {"card": "2,2,2,2,2,3,3"}
SECTION = 5  # layers


@dataclass(frozen=True)
class PrefetchRule:
    """At most caps[layer] copies ahead per layer and token, of experts whose probability of use is above `threshold`."""

    caps: tuple[int, ...]
    threshold: float = THRESHOLD

    def wanted(self, likely: NDArray[np.float32], there: NDArray[np.bool_], most: int) -> list[int]:
        """Keys to copy before the next token, in the order of their layers and within one the likeliest first.

        likely [layers, experts], NaN where no head says; `there` marks those with a slot. Of more than `most` the likeliest are
        taken. Ties go to the lower key.
        """
        open_ = np.where(there | ~(likely > self.threshold), -1.0, likely)
        keys: list[int] = []
        experts = open_.shape[1]
        for layer in np.flatnonzero(open_.max(1) > 0).tolist():
            row = open_[layer]
            best = np.argsort(-row, kind="stable")[: self.caps[layer]]
            keys += [layer * experts + expert for expert in best.tolist() if row[expert] > 0]
        if len(keys) > most:
            chances = open_.ravel()[keys]
            kept = np.sort(np.argsort(-chances, kind="stable")[:most])
            keys = [keys[place] for place in kept.tolist()]
        return keys


def parse_caps(text: str, layers: int, first_head: int) -> tuple[int, ...]:
    """Caps of all layers from "3", or from numbers for sections of five layers from the first with a head on ("2,2,3"; the last
    holds for what follows), or from the name of a preset. UsageError."""
    try:
        numbers = [int(part) for part in PRESETS.get(text, text).split(",")]
    except ValueError:
        numbers = [-1]
    if min(numbers) < 0:
        raise UsageError(
            f"--prefetch {text!r} must be a number of copies per layer and token, 0 for none, or one for each {SECTION} layers "
            f"(2,2,3), or {' or '.join(PRESETS)}"
        )
    sections = [max(0, layer - first_head) // SECTION for layer in range(layers)]
    return tuple(
        numbers[min(section, len(numbers) - 1)] if layer >= first_head else 0
        for layer, section in enumerate(sections)
    )


@dataclass
class PrefetchCounts:
    """Of copies that began before their layer asked, because a forecast or the layer before said so."""

    begun: int = 0
    used: int = 0  # by the call that they were meant for
    late: int = 0  # of those: not complete when it asked
    unused: int = 0
    begin_s: float = 0.0  # spent on starting those that a forecast named


@dataclass
class Brought:
    """What was copied ahead for layers that have not run yet: it keeps its slot until they have."""

    counts: PrefetchCounts = field(default_factory=PrefetchCounts)
    _by_layer: dict[int, set[int]] = field(default_factory=dict)
    _all: set[int] = field(default_factory=set)

    def add(self, layer: int, key: int) -> None:
        """A copy for `layer` has begun."""
        self._by_layer.setdefault(layer, set()).add(key)
        self._all.add(key)
        self.counts.begun += 1

    def discard(self, key: int) -> None:
        """Its copy was taken back in favour of a demand copy."""
        if key in self._all:
            self._all.remove(key)
            self.counts.unused += 1
            for keys in self._by_layer.values():
                keys.discard(key)

    def passed(self, layer: int, used: set[int], late: set[int]) -> set[int]:
        """The layer has been called and uses `used`, of which `late` are not complete; what was brought in vain."""
        keys = self._by_layer.pop(layer, None)
        if keys is None:
            return set()
        self._all -= keys
        self.counts.used += len(keys & used)
        self.counts.late += len(keys & late)
        self.counts.unused += len(keys - used)
        return keys - used

    def forget(self) -> set[int]:
        """All that waits for a layer that will not come, as after a forward that failed."""
        keys, self._all = self._all, set()
        self._by_layer.clear()
        self.counts.unused += len(keys)
        return keys

    def __contains__(self, key: object) -> bool:
        return key in self._all

    def __bool__(self) -> bool:
        return bool(self._all)
