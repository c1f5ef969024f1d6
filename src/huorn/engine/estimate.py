"""How fast a model should decode with a part of its experts in RAM, from what RAM and disk give: nothing is loaded."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from huorn.memory import MemoryBudget

# Share of all experts that are in slots, and share of lookups that hit while decoding, in percent: the default policy on the
# recorded routing of Qwen3-30B-A3B (benchmarks/choose_policy.py). Others differ; gpt-oss-120b is up to 7 points lower.
_SHARES = (0.0, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 1.0)
_HIT_PERCENT = (0.0, 22.2, 37.9, 56.1, 77.6, 88.4, 94.4, 96.6, 100.0)


@dataclass(frozen=True)
class SpeedEstimate:
    """Per decoded token: bytes from RAM and from disk, and tokens per second with both read one after the other."""

    hit_rate: float
    ram_bytes: float
    disk_bytes: float
    tok_s: float


def estimate_speed(
    budget: MemoryBudget,
    expert_bytes: int,
    lookups: int,
    resident_share: float,
    ram_bytes_s: float,
    disk_bytes_s: float,
) -> SpeedEstimate:
    """expert_bytes of one expert, lookups = layers x experts per token; resident_share of all experts that are in slots.

    A token reads all weights that every token needs but the embedding, and its experts; misses come from disk first.
    """
    hit_rate = float(np.interp(resident_share, _SHARES, _HIT_PERCENT)) / 100
    needed = budget.read_per_token_bytes + lookups * expert_bytes
    missed = (1 - hit_rate) * lookups * expert_bytes
    return SpeedEstimate(hit_rate, needed, missed, 1 / (needed / ram_bytes_s + missed / disk_bytes_s))
