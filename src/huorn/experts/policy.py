"""Which resident expert loses its slot when another one needs it."""

from __future__ import annotations

from collections.abc import Container
from math import inf
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from huorn.errors import UsageError
from huorn.experts.worth import Frequency, Recency, Valuation, Worth


class Policy(Protocol):
    """Told what is used and what has a slot, says who goes. Experts are keys: layer * experts_per_layer + expert.

    A policy moves no bytes and never changes what a model computes. One thread calls it.
    """

    name: str

    def use(self, layer: int, ids: NDArray[np.int32]) -> None:
        """One layer call routed these experts: ids int32 [T, K], once per layer call, in order, before its misses are loaded."""
        ...

    def admit(self, key: int) -> None:
        """This expert, which had none, now has a slot."""
        ...

    def drop(self, key: int) -> None:
        """This expert, which had a slot, lost it."""
        ...

    def victim(self, layer: int, protected: Container[int]) -> int | None:
        """The resident expert that should make room for one of `layer`; None when all residents are protected. Drops nothing."""
        ...

    def scores(self) -> Worth:
        """float64 [layers, experts], a copy: higher = keep longer, 0 = never used, whether resident or not."""
        ...

    def start_from(self, scores: Worth) -> None:
        """Begin with the scores of an earlier session, before the first use."""
        ...


class _Residents:
    """What both kinds of policy keep: who is resident, and what everybody is worth."""

    def __init__(self, name: str, valuation: Valuation) -> None:
        self.name = name
        self._valuation = valuation
        self._experts: int = valuation.worth.shape[1]
        self._resident = np.zeros(valuation.worth.shape, dtype=np.bool_)
        self._kept = np.full(valuation.worth.shape, inf)  # worth of residents, else infinity

    def use(self, layer: int, ids: NDArray[np.int32]) -> None:
        """See Policy."""
        self._valuation.use(layer, ids)
        self._kept[layer] = np.where(self._resident[layer], self._valuation.worth[layer], inf)

    def admit(self, key: int) -> None:
        """See Policy."""
        place = divmod(key, self._experts)
        assert not self._resident[place], f"expert {key} already has a slot"
        self._resident[place] = True
        self._kept[place] = self._valuation.worth[place]

    def drop(self, key: int) -> None:
        """See Policy."""
        place = divmod(key, self._experts)
        assert self._resident[place], f"expert {key} has no slot to lose"
        self._resident[place] = False
        self._kept[place] = inf

    def scores(self) -> Worth:
        """See Policy."""
        return self._valuation.worth.copy()

    def start_from(self, scores: Worth) -> None:
        """See Policy."""
        self._valuation.start_from(scores)
        self._kept = np.where(self._resident, self._valuation.worth, inf)

    def least_of(self, layer: int, protected: Container[int]) -> int | None:
        """The resident of least worth in `layer` that is not protected, if any; of equals the one with the lowest key."""
        row: Worth = self._kept[layer]
        first = layer * self._experts
        least = int(row.argmin())
        if row[least] == inf:
            return None
        if first + least not in protected:
            return first + least
        for expert in np.argsort(row, kind="stable").tolist():
            if row[expert] < inf and first + expert not in protected:
                return first + int(expert)
        return None


class GlobalPolicy(_Residents):
    """The resident of least worth in the whole model goes; of equals the one with the lowest key."""

    def victim(self, layer: int, protected: Container[int]) -> int | None:
        """See Policy. As a rule the first look is enough: what is protected was just used."""
        key = int(self._kept.argmin())
        if self._kept.flat[key] < inf and key not in protected:
            return key
        least = self._kept.min(axis=1)
        best = (inf, self._kept.size)  # worth, key
        for other in np.argsort(least, kind="stable").tolist():
            if (float(least[other]), other * self._experts) > best:
                break
            of_layer = self.least_of(other, protected)
            if of_layer is not None:
                best = min(best, (float(self._kept.flat[of_layer]), of_layer))
        return best[1] if best[0] < inf else None


class LayerPolicy(_Residents):
    """Every layer has a share of the slots; one that has its share gives up the least of its own.

    One that has less, or whose own residents are all protected, takes the least of the layer that is most above its share. So a
    call may have more than its layer's share, and the next calls take back what is worth least of it: with fewer slots than one
    token needs, each layer keeps its best, where a global order by age would drop each expert just before its next use.
    """

    def __init__(self, name: str, valuation: Valuation, slots: int) -> None:
        super().__init__(name, valuation)
        layers = len(self._resident)
        shares = [(slots + layers - 1 - layer) // layers for layer in range(layers)]
        self._over = -np.array(shares)  # residents beyond the share of each layer

    def admit(self, key: int) -> None:
        """See Policy."""
        super().admit(key)
        self._over[key // self._experts] += 1

    def drop(self, key: int) -> None:
        """See Policy."""
        super().drop(key)
        self._over[key // self._experts] -= 1

    def victim(self, layer: int, protected: Container[int]) -> int | None:
        """See Policy. Of layers equally far above their shares the first."""
        if self._over[layer] >= 0 and (key := self.least_of(layer, protected)) is not None:
            return key
        for other in np.argsort(-self._over, kind="stable").tolist():
            if (key := self.least_of(other, protected)) is not None:
                return key
        return None


POLICIES: tuple[str, ...] = ("lfu", "layer-lfu", "lru", "layer-lru")
BY_FORECAST = "forecast"  # experts/foresight.py
DEFAULT_POLICY = "lfu"  # chosen by replay, docs/benchmarks.md, as is the half-life
HALF_LIFE = 8.0  # tokens; 4 to 12 are within 0.2 points of it


def check_policy(name: str) -> None:
    """Raises UsageError when there is no policy of this name."""
    if name not in POLICIES:
        raise UsageError(f"there is no cache policy {name!r}; there are {', '.join(POLICIES)}")


def make_policy(name: str, layers: int, experts: int, slots: int, half_life: float = HALF_LIFE) -> Policy:
    """The policy `name` for a model of `layers` layers with `experts` experts each, and `slots` slots in all.

    half_life: tokens, of the two that count uses. Raises UsageError for an unknown name.
    """
    check_policy(name)
    valuation = Frequency(layers, experts, half_life) if name.endswith("lfu") else Recency(layers, experts)
    return LayerPolicy(name, valuation, slots) if name.startswith("layer-") else GlobalPolicy(name, valuation)
