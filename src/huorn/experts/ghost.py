"""What the best policy without forecasts would have missed in the cache's place: slots without bytes, told the same calls."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from huorn.experts.policy import DEFAULT_POLICY, make_policy
from huorn.experts.worth import Worth


class GhostCache:
    """Residents of `slots` slots under DEFAULT_POLICY, from what is resident and worth what now."""

    def __init__(self, shape: tuple[int, int], slots: int, resident: Iterable[int], worth: Worth) -> None:
        """shape is (layers, experts); resident are keys, at most `slots` of them."""
        self._policy = make_policy(DEFAULT_POLICY, *shape, slots)
        self._policy.start_from(worth)
        self._resident = set(resident)
        self._slots, self._experts = slots, shape[1]
        for key in self._resident:
            self._policy.admit(key)
        self.misses = 0

    def call(self, layer: int, ids: NDArray[np.int32]) -> None:
        """One layer call on ids i32 [T, K]: a lookup per distinct expert, and what is missed takes the place of others."""
        self._policy.use(layer, ids)
        first = layer * self._experts
        touched = {first + expert for expert in ids.ravel().tolist()}
        for key in touched - self._resident:
            self.misses += 1
            if len(self._resident) >= self._slots:
                leaving = self._policy.victim(layer, touched)
                if leaving is None:  # more experts in one call than slots
                    continue
                self._policy.drop(leaving)
                self._resident.remove(leaving)
            self._policy.admit(key)
            self._resident.add(key)
