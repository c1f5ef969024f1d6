"""From a checkpoint to a decoder whose experts are in RAM, in slots, or in mapped files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from huorn import _native
from huorn.checkpoint.reader import Checkpoint
from huorn.engine.fast_tier import FastTier, Residency, plan_fast_tier
from huorn.engine.forecast_control import ForecastControl
from huorn.engine.forecaster import Forecaster
from huorn.engine.forecasting import AUTO
from huorn.errors import UsageError
from huorn.experts.cache import ExpertCache
from huorn.experts.foresight import ForecastPolicy
from huorn.experts.policy import BY_FORECAST, DEFAULT_POLICY, Policy, make_policy
from huorn.experts.prefetch import PrefetchRule, parse_caps
from huorn.experts.reader import AHEAD_LANES, LANES, STRIPE_BYTES, URING
from huorn.experts.slots import Slots
from huorn.experts.store import PAGE, ExpertStore
from huorn.experts.warm import checkpoint_identity, load_warm
from huorn.kernels import isa
from huorn.model.cpu_decoder import CpuDecoder
from huorn.model.cpu_experts import ExpertTable, MappedTable
from huorn.model.cpu_load import load_cpu_decoder
from huorn.model.precision import Precision
from huorn.model.tables import LmHead, Tables
from huorn.predictor.served_bank import ServedBank, read_bank_config, served_bytes


@dataclass(frozen=True, eq=False)
class Opened:
    """A decoder on native kernels, what it has in RAM, and where that is not everything its cache and who forecasts for it."""

    decoder: CpuDecoder
    tier: FastTier
    cache: ExpertCache | None = None
    forecaster: Forecaster | None = None
    remark: str | None = None  # what a user should know of the forecasts


def open_cpu_decoder(
    checkpoint: Checkpoint,
    asked: Residency,
    context: int,
    precision: Precision,
    threads: int,
    lm_head: LmHead,
) -> Opened:
    """The decoder on native kernels: logits depend on the token ids alone, to the bit. Raises CheckpointError, UsageError."""
    folder = asked.forecasting.bank_of(checkpoint.directory)
    tier = plan_fast_tier(checkpoint, asked, context, precision, threads, lm_head, predictor_bytes(folder))
    runtime = _native.Runtime(threads, isa.chosen())
    scores = None if asked.warm is None else _saved(asked.warm, checkpoint)
    bank, remark = _bank(folder, checkpoint, asked) if tier.store is not None else (None, None)
    cache = None if tier.store is None else open_cache(tier.store, tier.slots, asked, bank)
    if cache is not None and scores is not None:
        cache.warm_up(scores)
    table: ExpertTable | None = cache if asked.mapped is None else MappedTable(checkpoint, asked.mapped)
    decoder = load_cpu_decoder(
        checkpoint, precision, runtime, table, Tables.of(checkpoint, precision, lm_head)
    )
    forecaster = None
    if cache is not None:
        if bank is not None:
            control = ForecastControl(cache, sum(cache.store.part_bytes), asked.forecasting.fixed)
            forecaster = Forecaster(bank, decoder, cache, control)
        cache.slots.populate()
    return Opened(decoder, tier, cache, forecaster, remark)


def predictor_bytes(folder: Path | None) -> int:
    """What the bank in a folder will take in RAM. UsageError when it is none."""
    return 0 if folder is None else served_bytes(read_bank_config(folder))


def _bank(
    folder: Path | None, checkpoint: Checkpoint, asked: Residency
) -> tuple[ServedBank | None, str | None]:
    """The bank, or why the one that lies beside the model is not used."""
    if folder is None:
        return None, None
    try:
        return ServedBank.open(folder, checkpoint), None
    except UsageError as error:
        if asked.forecasting.predictor != AUTO:
            raise
        return None, f"no forecasts: {error}"


def _saved(warm: Path, checkpoint: Checkpoint) -> NDArray[np.float64] | None:
    """What an earlier session wrote; None when there was none. UsageError when it could not be written at the end of this one."""
    if warm.exists():
        return load_warm(warm, checkpoint_identity(checkpoint))
    if not warm.parent.is_dir():
        raise UsageError(f"--warm {warm} can not be written: {warm.parent} is no folder; name a file in one")
    return None


def open_cache(store: ExpertStore, slots: int, asked: Residency, bank: ServedBank | None) -> ExpertCache:
    """Empty slots that are filled from the checkpoint's files. UsageError when the system does not give their memory."""
    config, forecasting = store.checkpoint.config, asked.forecasting
    try:
        room = Slots(store, slots)
    except OSError as error:
        raise UsageError(
            f"{slots:,} slots of {store.slot_bytes:,} bytes were refused by the system: give fewer --slots or less --memory"
        ) from error
    name = asked.policy or (DEFAULT_POLICY if bank is None else BY_FORECAST)
    if name == BY_FORECAST and bank is None:
        raise UsageError(
            f"--policy {BY_FORECAST} needs a bank of this model: name one with --predictor, or give another policy"
        )
    layers, experts = config.num_hidden_layers, config.num_experts
    policy: Policy = (
        ForecastPolicy(layers, experts) if name == BY_FORECAST else make_policy(name, layers, experts, slots)
    )
    prefetch = None
    if bank is not None:
        caps = parse_caps(forecasting.caps, layers, bank.config.heads.layers[0])
        prefetch = PrefetchRule(caps, forecasting.threshold) if any(caps) else None
    stripe, lanes = (STRIPE_BYTES, LANES) if asked.overlap else (store.slot_bytes, 1)
    if asked.link_bytes_s:
        stripe = max(PAGE, store.slot_bytes // 6)  # as many stripes as experts of 3 MB have
    reader = _native.Reader(
        lanes, stripe, direct=True, uring=URING, ahead_lanes=min(AHEAD_LANES, lanes), link_bytes_s=asked.link_bytes_s or 0.0
    )  # fmt: skip
    return ExpertCache(
        store, room, policy, reader, looks_ahead=forecasting.lookahead, prefetch=prefetch,
        overlap=asked.overlap,
    )  # fmt: skip
