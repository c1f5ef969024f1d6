"""From a checkpoint to a decoder whose experts are in RAM, in slots, or in mapped files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from huorn import _native
from huorn.checkpoint.reader import Checkpoint
from huorn.engine.fast_tier import FastTier, Residency, plan_fast_tier
from huorn.errors import UsageError
from huorn.experts.cache import ExpertCache
from huorn.experts.policy import make_policy
from huorn.experts.reader import LANES, STRIPE_BYTES, URING
from huorn.experts.slots import Slots
from huorn.experts.store import ExpertStore
from huorn.experts.warm import checkpoint_identity, load_warm
from huorn.kernels import isa
from huorn.model.cpu_decoder import CpuDecoder
from huorn.model.cpu_experts import ExpertTable, MappedTable
from huorn.model.cpu_load import load_cpu_decoder
from huorn.model.precision import Precision
from huorn.model.tables import LmHead, Tables


def open_cpu_decoder(
    checkpoint: Checkpoint,
    asked: Residency,
    context: int,
    precision: Precision,
    threads: int,
    lm_head: LmHead,
) -> tuple[CpuDecoder, FastTier, ExpertCache | None]:
    """The decoder on native kernels (logits depend on the token ids alone, to the bit), what it has in RAM, and its cache where
    that is not everything. Raises CheckpointError, UsageError."""
    tier = plan_fast_tier(checkpoint, asked, context, precision, threads, lm_head)
    runtime = _native.Runtime(threads, isa.chosen())
    scores = None if asked.warm is None else _saved(asked.warm, checkpoint)
    cache = None if tier.store is None else open_cache(tier.store, tier.slots, asked.policy)
    if cache is not None and scores is not None:
        cache.warm_up(scores)
    table: ExpertTable | None = cache if asked.mapped is None else MappedTable(checkpoint, asked.mapped)
    decoder = load_cpu_decoder(
        checkpoint, precision, runtime, table, Tables.of(checkpoint, precision, lm_head)
    )
    if cache is not None:
        cache.slots.populate()
    return decoder, tier, cache


def _saved(warm: Path, checkpoint: Checkpoint) -> NDArray[np.float64] | None:
    """What an earlier session wrote; None when there was none. UsageError when it could not be written at the end of this one."""
    if warm.exists():
        return load_warm(warm, checkpoint_identity(checkpoint))
    if not warm.parent.is_dir():
        raise UsageError(f"--warm {warm} can not be written: {warm.parent} is no folder; name a file in one")
    return None


def open_cache(store: ExpertStore, slots: int, policy: str) -> ExpertCache:
    """Empty slots that are filled from the checkpoint's files. UsageError when the system does not give their memory."""
    config = store.checkpoint.config
    try:
        room = Slots(store, slots)
    except OSError as error:
        raise UsageError(
            f"{slots:,} slots of {store.slot_bytes:,} bytes were refused by the system: give fewer --slots or less --memory"
        ) from error
    reader = _native.Reader(LANES, STRIPE_BYTES, direct=True, uring=URING)
    return ExpertCache(
        store, room, make_policy(policy, config.num_hidden_layers, config.num_experts, slots), reader
    )
