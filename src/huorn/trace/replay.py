"""What a cache policy would have made of a recorded session: hits and misses, counted as the cache itself would count them.

One lookup per distinct expert and layer call. Misses are loaded one after the other, in the order in which the call names them;
where there is no room the policy says who goes, and what the call touched stays. If a call touches more than fits, it runs in
waves: once all residents are its own, they have been used and may go.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from huorn.errors import UsageError
from huorn.experts.policy import GlobalPolicy, Policy, make_policy
from huorn.experts.worth import Worth
from huorn.trace.route_csv import LayerCall, RouteTrace

MIB = 2**20


@dataclass(frozen=True)
class Count:
    """Lookups, and how many of them found the expert in a slot."""

    lookups: int
    hits: int

    @property
    def percent(self) -> float:
        """Hit rate in percent; 0 without lookups."""
        return 100 * self.hits / max(1, self.lookups)


@dataclass(frozen=True)
class Replayed:
    """Of all calls, and of decode alone; bytes that were loaded; how many loads were copies ahead, not for a miss."""

    all: Count
    decode: Count
    loaded_bytes: int
    prefetched: int = 0
    late: int = 0  # lookups that found a copy ahead under way
    token_s: float | None = None  # of a timed replay
    wait_s: float | None = None

    @property
    def misses(self) -> int:
        """Lookups that had to wait for a load that began then."""
        return self.all.lookups - self.all.hits - self.late

    @property
    def loads(self) -> int:
        """Of misses and ahead."""
        return self.misses + self.prefetched


def replay(trace: RouteTrace, policy: Policy, capacity_bytes: int) -> Replayed:
    """Runs `policy`, which must be new, with room for `capacity_bytes` of experts.

    Raises UsageError when not even one expert fits.
    """
    if capacity_bytes < max(trace.expert_bytes):
        raise UsageError(
            f"a cache of {capacity_bytes} bytes has no room for an expert of {max(trace.expert_bytes)}"
        )
    resident: set[int] = set()
    used = loaded = 0
    lookups, hits = [0, 0], [0, 0]
    for call in trace.calls:
        policy.use(call.layer, call.ids)
        first = call.layer * trace.experts
        touched = dict.fromkeys(first + expert for expert in call.ids.ravel().tolist())
        misses = [key for key in touched if key not in resident]
        lookups[call.decode] += len(touched)
        hits[call.decode] += len(touched) - len(misses)
        protected = set(touched)
        for key in misses:
            needed = trace.expert_bytes[call.layer]
            while used + needed > capacity_bytes:
                leaving = policy.victim(call.layer, protected)
                if leaving is None:
                    protected = set()  # the next wave: those that are loaded from here on
                    continue
                policy.drop(leaving)
                resident.remove(leaving)
                used -= trace.expert_bytes[leaving // trace.experts]
            policy.admit(key)
            resident.add(key)
            protected.add(key)
            used += needed
            loaded += needed
    return Replayed(Count(sum(lookups), sum(hits)), Count(lookups[True], hits[True]), loaded)


def replay_policy(trace: RouteTrace, name: str, capacity_bytes: int) -> Replayed:
    """Runs a policy by its name, told of as many slots as experts of mean size fit.

    Raises UsageError for an unknown name, and as `replay` does.
    """
    slots = capacity_bytes * trace.layers // sum(trace.expert_bytes)
    return replay(trace, make_policy(name, trace.layers, trace.experts, slots), capacity_bytes)


def replay_bypass(trace: RouteTrace, capacity_bytes: int) -> Replayed:
    """The bound of caches that need not keep what they load: after each call those stay whose next use is soonest.

    Exact where all experts have one size. Raises UsageError as `replay`.
    """
    if capacity_bytes < max(trace.expert_bytes):
        raise UsageError(
            f"a cache of {capacity_bytes} bytes has no room for an expert of {max(trace.expert_bytes)}"
        )
    valuation = _NextUse(trace.calls, trace.layers, trace.experts)
    policy = GlobalPolicy("bypass", valuation)
    resident: set[int] = set()
    used = loaded = 0
    lookups, hits = [0, 0], [0, 0]
    for call in trace.calls:
        policy.use(call.layer, call.ids)
        first, size = call.layer * trace.experts, trace.expert_bytes[call.layer]
        touched = dict.fromkeys(first + expert for expert in call.ids.ravel().tolist())
        lookups[call.decode] += len(touched)
        for key in touched:
            if key in resident:
                hits[call.decode] += 1
                continue
            policy.admit(key)
            resident.add(key)
            used, loaded = used + size, loaded + size
        while used > capacity_bytes:
            leaving = policy.victim(call.layer, ())
            assert leaving is not None
            policy.drop(leaving)
            resident.remove(leaving)
            used -= trace.expert_bytes[leaving // trace.experts]
    return Replayed(Count(sum(lookups), sum(hits)), Count(lookups[True], hits[True]), loaded)


def replay_belady(trace: RouteTrace, capacity_bytes: int) -> Replayed:
    """The bound that no policy passes: the resident goes whose next use is furthest away. Exact where all experts have one size.

    Like every policy it must load what a call misses. Raises UsageError as `replay`.
    """
    valuation = _NextUse(trace.calls, trace.layers, trace.experts)
    return replay(trace, GlobalPolicy("belady", valuation), capacity_bytes)


class _NextUse:
    """Worth is how soon an expert is used again: minus the number of that call."""

    def __init__(self, calls: Sequence[LayerCall], layers: int, experts: int) -> None:
        self.worth: Worth = np.full((layers, experts), -float(len(calls)))
        self._after: list[
            NDArray[np.float64]
        ] = []  # per call, last first: worth of its layer's experts after it
        for number in range(len(calls) - 1, -1, -1):
            row = self.worth[calls[number].layer]
            self._after.append(row.copy())
            row[calls[number].ids.ravel()] = -float(number)

    def use(self, layer: int, ids: NDArray[np.int32]) -> None:
        """The calls must come in the order of the trace."""
        self.worth[layer] = self._after.pop()

    def start_from(self, worth: Worth) -> None:
        """The future needs no past."""
