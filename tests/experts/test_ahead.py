"""Copies ahead: whatever a forecast says, and however its copies land, logits are those of all experts in RAM."""

from __future__ import annotations

import errno
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from huorn.experts.cache import ExpertCache
from huorn.experts.foresight import Forecast, ForecastPolicy
from huorn.experts.policy import Policy, make_policy
from huorn.experts.prefetch import PrefetchRule
from huorn.experts.reader import ReaderLike
from huorn.experts.slots import Slots, SlotState
from huorn.model.cpu_decoder import CpuDecoder
from huorn.model.cpu_load import load_cpu_decoder
from huorn.model.precision import Precision
from huorn.model.state import DecodeState

from .scripted_reader import ScriptedReader, all_at_once, shuffled
from .test_cache import TOKENS, check_slots, expected, native_reader, runtime, store

LAYERS, EXPERTS = 8, 64


def decoder_with(
    count: int, policy: str, reader: ReaderLike, caps: int = 3, threshold: float = 0.15, lookahead: bool = False,
    overlap: bool = True,
) -> tuple[CpuDecoder, ExpertCache]:  # fmt: skip
    rules: Policy = (
        ForecastPolicy(LAYERS, EXPERTS)
        if policy == "forecast"
        else make_policy(policy, LAYERS, EXPERTS, count)
    )
    cache = ExpertCache(
        store(), Slots(store(), count), rules, reader, looks_ahead=lookahead,
        prefetch=PrefetchRule((caps,) * LAYERS, threshold), overlap=overlap,
    )  # fmt: skip
    return load_cpu_decoder(store().checkpoint, Precision.BF16, runtime(), cache), cache


def random_forecast(rng: np.random.Generator) -> Forecast:
    """Some layers without a head; within more tokens never less likely."""
    said = np.sort(rng.random((LAYERS, 3, EXPERTS)).astype(np.float32) ** 4, axis=1)
    said[rng.random(LAYERS) < 0.2] = np.nan
    return said


def decode(
    decoder: CpuDecoder, cache: ExpertCache, forecasts: np.random.Generator, steps: int, most: int
) -> None:
    """Expected logits, step after step, with a random forecast before each."""
    truth, state = expected(), DecodeState.new(decoder.config, TOKENS, Precision.BF16)
    for at in range(steps):
        cache.foresee(random_forecast(forecasts) if at % 5 else None, most)
        assert torch.equal(decoder.forward(truth.ids[at : at + 1], state), truth.logits[at : at + 1]), at


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_logits_are_the_same_whatever_is_forecast(data: st.DataObject) -> None:
    draw, seed = data.draw, data.draw(st.integers(0, 9999))
    random = Random(seed)
    keys = range(LAYERS * EXPERTS)
    reader = ScriptedReader(
        order=shuffled(seed), delays={key: random.randint(0, 4) for key in random.sample(keys, 200)},
        started=set(random.sample(keys, 100)),
    )  # fmt: skip
    decoder, cache = decoder_with(
        draw(st.sampled_from([8, 20, 64, 100, 300])), draw(st.sampled_from(["forecast", "lfu", "lru", "layer-lfu"])), reader,
        draw(st.integers(0, 8)), draw(st.sampled_from([0.0, 0.15, 0.9])), draw(st.booleans()),
    )  # fmt: skip
    decode(decoder, cache, np.random.default_rng(seed), 12, draw(st.sampled_from([0, 3, 100])))
    check_slots(cache)


@pytest.mark.parametrize("slots", [8, 64, 128])
@pytest.mark.parametrize("lookahead", [False, True])
def test_on_the_native_reader(slots: int, lookahead: bool) -> None:
    decoder, cache = decoder_with(slots, "forecast", native_reader(uring=False), lookahead=lookahead)
    decode(decoder, cache, np.random.default_rng(slots), 60, 24)
    check_slots(cache)
    assert cache.brought.counts.begun > 0
    ahead = cache.brought.counts
    cache.foresee(None)
    assert ahead.begun == ahead.used + ahead.unused


def test_a_forecast_starts_the_likeliest_copies_in_the_order_of_layers() -> None:
    reader = ScriptedReader(delays=dict.fromkeys(range(LAYERS * EXPERTS), 5))
    _, cache = decoder_with(128, "forecast", reader, caps=2, threshold=0.5)
    said = np.zeros((LAYERS, 3, EXPERTS), dtype=np.float32)
    said[5, :, 7], said[2, :, [9, 3, 4]], said[3, :, 1] = 0.9, np.array([0.6, 0.8, 0.7])[:, None], 0.4
    cache.foresee(said, 10)
    assert reader.calls == [
        ("prefetch", 2 * EXPERTS + 3),
        ("prefetch", 2 * EXPERTS + 4),
        ("prefetch", 5 * EXPERTS + 7),
    ]
    cache.foresee(None)  # none of them has begun
    cancelled = sorted(key for name, key in reader.calls if name == "cancel")
    assert cancelled == [2 * EXPERTS + 3, 2 * EXPERTS + 4, 5 * EXPERTS + 7]
    assert cache.slots.free == 128


def test_copies_for_a_layer_that_has_run_are_taken_back() -> None:
    reader = ScriptedReader(delays=dict.fromkeys((EXPERTS + 3, EXPERTS + 4, 2 * EXPERTS + 5), 2))
    _, cache = decoder_with(128, "forecast", reader)
    said = np.zeros((LAYERS, 3, EXPERTS), dtype=np.float32)
    said[1, :, [3, 4]], said[2, :, 5] = 0.9, 0.9
    cache.foresee(said, 10)
    for _ in cache.waves(1, np.array([[3, 20]], dtype=np.int32)):
        pass
    assert ("cancel", EXPERTS + 4) in reader.calls
    assert ("cancel", 2 * EXPERTS + 5) not in reader.calls
    assert ("promote", EXPERTS + 3) in reader.calls
    assert cache.counts.loading_hits == 1
    assert cache.counts.misses == 1
    assert cache.slots.state(EXPERTS + 4) is SlotState.EMPTY


# Of experts used equally often lfu gives up that of the lowest key, which is likelier to be used.
@pytest.mark.parametrize(("policy", "wanted"), [("forecast", [6 * EXPERTS + 1]), ("lfu", [])])
def test_what_is_likelier_to_be_used_keeps_its_slot(policy: str, wanted: list[int]) -> None:
    reader = ScriptedReader(order=all_at_once)
    _, cache = decoder_with(8, policy, reader, caps=8, threshold=0.1)
    for _ in cache.waves(4, np.arange(8, dtype=np.int32)[None]):
        pass
    said = np.zeros((LAYERS, 3, EXPERTS), dtype=np.float32)
    said[4, :, :7], said[4, :, 7], said[6, :, 1], said[6, :, 2] = 0.9, 0.2, 0.5, 0.15
    cache.foresee(said, 8)
    started = [key for name, key in reader.calls if name == "prefetch"]
    assert started == wanted  # in the place of expert 7 of layer 4; for expert 2 nobody goes
    assert (cache.slots.state(4 * EXPERTS + 7) is SlotState.EMPTY) == bool(wanted)


def test_a_copy_ahead_that_fails_is_no_error() -> None:
    reader = ScriptedReader(errors=dict.fromkeys(range(EXPERTS, 2 * EXPERTS), (errno.EIO, 0)))
    _, cache = decoder_with(128, "forecast", reader)
    said = np.zeros((LAYERS, 3, EXPERTS), dtype=np.float32)
    said[1, :, [3, 4]] = 0.9
    cache.foresee(said, 10)
    cache.settle()
    cache.settle()
    assert cache.slots.free == 128


def test_without_overlap_nothing_is_computed_before_the_last_copy() -> None:
    reader = ScriptedReader()
    decoder, cache = decoder_with(64, "lfu", reader, overlap=False)
    groups = list(cache.waves(0, np.array([[1, 2, 3]], dtype=np.int32)))
    assert sorted(groups[0]) == [1, 2, 3]
    assert [name for name, _ in reader.calls] == ["demand", "landed"] * 3
    decode(decoder, cache, np.random.default_rng(0), 5, 0)
