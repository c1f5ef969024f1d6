"""Experts in slots: whatever is resident, in whatever order copies land and fail, logits are those of all experts in RAM."""

from __future__ import annotations

import errno
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from huorn import _native
from huorn.assets import EMBEDDED_MODEL
from huorn.checkpoint.reader import Checkpoint
from huorn.errors import CheckpointError
from huorn.experts.cache import ExpertCache
from huorn.experts.policy import POLICIES, make_policy
from huorn.experts.reader import CHANGED, LANES, STRIPE_BYTES, TRUNCATED, ReaderLike
from huorn.experts.slots import Slots, SlotState
from huorn.experts.store import ExpertStore
from huorn.kernels import isa
from huorn.model.cpu_decoder import CpuDecoder, Sequences
from huorn.model.cpu_load import load_cpu_decoder
from huorn.model.precision import Precision
from huorn.model.state import DecodeState

from .scripted_reader import Order, ScriptedReader, all_at_once, all_reversed, one_by_one, shuffled

TOKENS = 2000
LONG = 80  # of the drawn cases
ORDERS: dict[str, Order] = {"one by one": one_by_one, "at once": all_at_once, "reversed": all_reversed}


@lru_cache(maxsize=1)
def checkpoint() -> Checkpoint:
    return Checkpoint.open(EMBEDDED_MODEL)


@lru_cache(maxsize=1)
def store() -> ExpertStore:
    return ExpertStore.of(checkpoint())


@dataclass(frozen=True)
class Expected:
    """A text and the logits f32 [T, V] of the decoder with all experts in RAM, in pieces of 512."""

    decoder: CpuDecoder
    ids: Tensor
    logits: Tensor


@lru_cache(maxsize=1)
def expected() -> Expected:
    decoder = load_cpu_decoder(checkpoint(), Precision.BF16, runtime())
    ids = torch.randint(0, decoder.config.vocab_size, (TOKENS,), generator=torch.Generator().manual_seed(7))
    state = DecodeState.new(decoder.config, TOKENS, Precision.BF16)
    return Expected(decoder, ids, torch.cat([decoder.forward(part, state, True) for part in ids.split(512)]))


def runtime() -> _native.Runtime:
    return _native.Runtime(2, isa.chosen())


def native_reader(uring: bool = True) -> ReaderLike:
    return _native.Reader(LANES, STRIPE_BYTES, direct=True, uring=uring)


def with_slots(
    count: int, policy: str = "layer-lfu", reader: ReaderLike | None = None, source: ExpertStore | None = None
) -> tuple[CpuDecoder, ExpertCache]:
    """seedling (or the checkpoint of `source`) in `count` slots."""
    source = source or store()
    config = source.checkpoint.config
    rules = make_policy(policy, config.num_hidden_layers, config.num_experts, count)
    cache = ExpertCache(source, Slots(source, count), rules, reader or native_reader())
    return load_cpu_decoder(source.checkpoint, Precision.BF16, runtime(), cache), cache


def check(decoder: CpuDecoder, lengths: Sequence[int], all_logits: bool = True) -> None:
    """A fresh sequence in pieces of these lengths gives the expected logits."""
    truth, state, at = expected(), DecodeState.new(decoder.config, TOKENS, Precision.BF16), 0
    for length in lengths:
        logits = decoder.forward(truth.ids[at : at + length], state, all_logits)
        at += length
        assert torch.equal(logits, truth.logits[at - (length if all_logits else 1) : at]), (at, length)


def check_slots(cache: ExpertCache) -> None:
    """Nothing is under way, no more experts are ready than there are slots, and the kernels' table shows exactly those."""
    while cache.reader.in_flight:
        cache.settle()
    keys = range(len(cache.store.runs))
    states = Counter(cache.slots.state(key) for key in keys)
    assert states[SlotState.LOADING] == 0
    assert states[SlotState.READY] + cache.slots.free == cache.slots.count
    rows = cache.slots.table.view(len(keys), 6)
    shown = {key for key in keys if rows[key].any()}
    assert shown == {key for key in keys if cache.slots.state(key) is SlotState.READY}


# ---- the same bits ----


@pytest.mark.parametrize("count", [8, 9, 63, 64, 65, 128, 511, 512])
def test_boundaries(count: int) -> None:
    decoder, cache = with_slots(count)
    check(decoder, [1] * 20)
    check(decoder, [3, 1, 4, 2, 64, 1, 1])  # warm, and more distinct experts in one call than slots
    check_slots(cache)
    assert cache.counts.misses > 0


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 63, 64, 65, 512, 2000])
@pytest.mark.parametrize("count", [8, 64, 300])
def test_prefill(tokens: int, count: int) -> None:
    decoder, cache = with_slots(count)
    whole, rest = divmod(tokens, 512)
    check(decoder, [512] * whole + [rest] * (rest > 0) + [1] * min(3, TOKENS - tokens), all_logits=False)
    check_slots(cache)


@st.composite
def cuts(draw: st.DrawFn) -> list[int]:
    lengths = draw(st.lists(st.sampled_from([1, 1, 1, 2, 3, 4, 5, 17, 64, 70]), min_size=1, max_size=8))
    while sum(lengths) > LONG:
        lengths.pop()
    return lengths or [LONG]


@settings(max_examples=200, deadline=None)
@given(
    count=st.one_of(st.integers(8, 70), st.integers(8, 512)),
    policy=st.sampled_from(POLICIES),
    order=st.one_of(
        st.sampled_from(sorted(ORDERS)), st.integers(0, 1000), st.sampled_from(["io_uring", "threads"])
    ),
    runs=st.lists(cuts(), min_size=1, max_size=2),  # the first cold, the second warm
)
def test_any_slots_policy_order_and_cut(
    count: int, policy: str, order: str | int, runs: list[list[int]]
) -> None:
    reader: ReaderLike
    if order in ("io_uring", "threads"):
        reader = native_reader(order == "io_uring")
    else:
        reader = ScriptedReader(order=shuffled(order) if isinstance(order, int) else ORDERS[order])
    decoder, cache = with_slots(count, policy, reader)
    for lengths in runs:
        check(decoder, lengths)
    check_slots(cache)


def test_sequences_together() -> None:
    truth = expected()
    decoder, _ = with_slots(40, reader=ScriptedReader(order=shuffled(3)))
    starts = [0, 0, 0]
    states = [DecodeState.new(decoder.config, 64, Precision.BF16) for _ in starts]
    for lengths in ([1, 2, 5], [1, 1, 1], [3, 1, 2]):
        parts = [truth.ids[at : at + n] for at, n in zip(starts, lengths, strict=True)]
        logits = decoder.forward_batch(Sequences(parts, states), all_logits=True)
        for number, (at, n) in enumerate(zip(starts, lengths, strict=True)):
            assert torch.equal(logits[number], truth.logits[at : at + n])
            starts[number] = at + n


@pytest.mark.parametrize("count", [8, 128])
def test_256_tokens_of_text(count: int) -> None:
    def text(decoder: CpuDecoder) -> list[int]:
        state, token = DecodeState.new(decoder.config, 300, Precision.BF16), expected().ids[:9]
        found: list[int] = []
        while len(found) < 256:
            token = decoder.forward(token, state).argmax(-1)
            found.append(int(token))
        return found

    decoder, cache = with_slots(count)
    assert text(decoder) == text(expected().decoder)
    assert cache.counts.hits > 0 or count == 8


# ---- what is copied ----


def test_a_long_prompt_copies_each_expert_at_most_once_per_chunk() -> None:
    """585 tokens at 12.5 % residency; another engine fetched 64,369 times for 3,840 experts."""
    reader = ScriptedReader()
    decoder, cache = with_slots(512 // 8, reader=reader)
    truth, state = expected(), DecodeState.new(expected().decoder.config, 600, Precision.BF16)
    for part in (truth.ids[:512], truth.ids[512:585]):
        reader.calls.clear()
        decoder.forward(part, state)
        landed = Counter(key for what, key in reader.calls if what == "landed")
        assert landed
        assert max(landed.values()) == 1
    assert any(what == "prefetch" for what, _ in reader.calls)  # the next layer's, while one computes
    check_slots(cache)


def test_decode_is_warmer_after_a_prompt() -> None:
    """The residents after a prompt serve what follows it better than those of a cold start."""

    def hit_rate(prompt: int) -> float:
        decoder, cache = with_slots(128, reader=ScriptedReader())
        state, text = DecodeState.new(decoder.config, 600, Precision.BF16), truth_text()
        if prompt:
            decoder.forward(text[512 - prompt : 512], state)
        cache.counts.hits = cache.counts.misses = cache.counts.loading_hits = 0
        for token in text[512:524].split(1):
            decoder.forward(token, state)
        return cache.counts.hits / cache.counts.lookups

    assert hit_rate(400) > hit_rate(0) + 0.1


def truth_text() -> Tensor:
    """Real text, so that neighbours route alike."""
    from huorn.bench.decode import PROMPT
    from huorn.engine.tokenizer import encode, load_tokenizer

    ids = encode(load_tokenizer(EMBEDDED_MODEL, checkpoint().config.vocab_size), PROMPT * 12)
    return torch.tensor(ids[:540])


def test_experts_of_the_running_call_are_never_evicted() -> None:
    """One slot more than a token needs, and many tokens: kernels would read an overwritten slot if one were."""
    reader = ScriptedReader(order=all_reversed)
    decoder, _ = with_slots(9, "lru", reader)
    check(decoder, [64, 3, 1, 1, 2])


# ---- slots ----


def test_a_slot_holds_what_the_file_holds() -> None:
    cache = with_slots(8)[1]
    for key in (0, 77, 511):
        layer, expert = divmod(key, 64)
        list(cache.waves(layer, np.array([[expert]], dtype=np.int32)))
        weights = checkpoint().expert(layer, expert)
        row = cache.slots.table[layer, expert].tolist()
        for address, scale_at, weight in zip(
            row[:3], row[3:], (weights.gate, weights.up, weights.down), strict=True
        ):
            stored = weight.data.contiguous().view(torch.uint8).flatten()
            assert torch.equal(memory(address, stored.numel()), stored)
            assert weight.scale_inv is not None
            scale = weight.scale_inv.float().flatten()
            assert torch.equal(memory(scale_at, 4 * scale.numel()).view(torch.float32), scale)


def memory(address: int, nbytes: int) -> Tensor:
    import ctypes

    return torch.frombuffer(bytearray(ctypes.string_at(address, nbytes)), dtype=torch.uint8)


# ---- faults ----


def first_miss(layer: int) -> int:
    """Key of an expert that the first token needs in this layer."""
    reader = ScriptedReader()
    decoder, _ = with_slots(512, reader=reader)
    decoder.forward(expected().ids[:1], DecodeState.new(decoder.config, 4, Precision.BF16))
    return next(key for what, key in reader.calls if what == "demand" and key // 64 == layer)


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (errno.EIO, "Input/output error"),
        (TRUNCATED, "it was truncated"),
        (CHANGED, "was changed after it was opened"),
    ],
)
@pytest.mark.parametrize("layer", [0, 5])
def test_a_failed_copy_ends_its_request_only(error: int, sentence: str, layer: int) -> None:
    key = first_miss(layer)
    reader = ScriptedReader(errors={key: (error, 12345)}, order=all_at_once)
    decoder, cache = with_slots(100, reader=reader)
    state = DecodeState.new(decoder.config, TOKENS, Precision.BF16)
    conv, recurrent = state.conv, state.recurrent
    for _ in range(2):  # it fails as often as it is tried
        with pytest.raises(CheckpointError, match=sentence) as failed:
            decoder.forward(expected().ids[:1], state)
        assert f"expert {key % 64} of layer {layer}" in str(failed.value)
        assert "12345" in str(failed.value)
        assert "model.safetensors" in str(failed.value)
        assert (state.position, state.conv, state.recurrent) == (0, conv, recurrent)
        check_slots(cache)
        assert cache.slots.state(key) is SlotState.EMPTY
    reader.errors.clear()
    check(decoder, [1, 3, 9])  # the next request, and the one that failed, if tried again


def test_one_request_fails_while_another_goes_on() -> None:
    """A has read 20 tokens when the disk fails under B; A goes on to the same bits."""
    reader = ScriptedReader(order=shuffled(5))
    decoder, cache = with_slots(64, reader=reader)
    truth, going = expected(), DecodeState.new(expected().decoder.config, 64, Precision.BF16)
    decoder.forward(truth.ids[:20], going)
    reader.errors = dict.fromkeys(range(448, 512), (errno.EIO, 1))  # layer 7 can not be read
    other = DecodeState.new(decoder.config, 64, Precision.BF16)
    with pytest.raises(CheckpointError, match="layer 7"):
        decoder.forward(truth.ids[700:764], other)
    reader.errors.clear()
    assert torch.equal(decoder.forward(truth.ids[20:30], going, True), truth.logits[20:30])
    check_slots(cache)


def test_a_slow_copy_is_waited_for() -> None:
    reader = ScriptedReader(order=all_at_once, delays=dict.fromkeys(range(0, 512, 3), 7))
    decoder, _ = with_slots(100, reader=reader)
    check(decoder, [1, 1, 40])


def test_a_failed_prefetch_is_no_failure() -> None:
    """Layer 3 is streamed ahead while layer 2 computes; one copy fails once, and nobody notices."""
    reader = ScriptedReader()
    decoder, cache = with_slots(200, reader=reader)
    submit, failed = reader.submit, list[int]()

    def once(key: int, segments: Sequence[tuple[int, int, int, int]], demand: bool) -> None:
        if not demand and not failed:
            failed.append(key)
            reader.errors[key] = (errno.EIO, 0)
        elif key in failed:
            reader.errors.pop(key, None)
        submit(key, segments, demand)

    reader.submit = once  # type: ignore[method-assign]
    state = DecodeState.new(decoder.config, 200, Precision.BF16)
    try:
        logits = decoder.forward(expected().ids[:150], state, True)
    except CheckpointError:
        assert failed[0] in {
            key for what, key in reader.calls if what == "promote"
        }  # it was waited for by then
    else:
        assert torch.equal(logits, expected().logits[:150])
    assert failed
    check_slots(cache)
    check(decoder, [150, 1])


def test_a_prefetch_dropped_in_mid_copy_is_copied_again_when_it_is_needed() -> None:
    """All slots are taken by a warm start under way; a miss drops its copies, and the next call needs one of them."""
    reader = ScriptedReader()
    _, cache = with_slots(8, reader=reader)
    scores = np.zeros((8, 64))
    scores[3, :8] = 1.0
    cache.warm_up(scores)
    reader.started = set(range(3 * 64, 3 * 64 + 8))
    reader.delays = dict.fromkeys(reader.started, 1)  # none has landed when the miss comes
    assert sorted(chain.from_iterable(cache.waves(0, np.array([[5]], dtype=np.int32)))) == [5]
    assert cache.slots.state(3 * 64 + 7) is SlotState.LOADING  # dropped, and its completion not heard of yet
    assert sorted(chain.from_iterable(cache.waves(3, np.array([[6, 7]], dtype=np.int32)))) == [6, 7]
    check_slots(cache)


def test_completions_that_were_never_heard_of_are_copied_again() -> None:
    """Ctrl-C between the reader's answer and the first line that could note it."""
    reader = ScriptedReader(order=all_at_once)
    _, cache = with_slots(20, reader=reader)
    groups = cache.waves(2, np.array([[1, 2, 3]], dtype=np.int32))
    assert next(groups) == []
    assert len(reader.wait(0.0)) == 3  # lost
    assert sorted(chain.from_iterable(groups)) == [1, 2, 3]
    check_slots(cache)


def test_a_nan_code_is_refused_when_it_lands(tmp_path: Path) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(EMBEDDED_MODEL, folder)
    part = Checkpoint.open(folder).expert_parts(2, 5)[2]
    with part.file.open("r+b") as file:
        file.seek(part.start + part.nbytes - 1)
        file.write(b"\x7f")
    cache = with_slots(20, source=ExpertStore.of(Checkpoint.open(folder)))[1]
    with pytest.raises(
        CheckpointError, match=r"layers\.2\.mlp\.experts\.5\.down_proj\.weight holds the NaN code"
    ):
        list(cache.waves(2, np.array([[4, 5]], dtype=np.int32)))
    check_slots(cache)
    assert list(cache.waves(2, np.array([[6]], dtype=np.int32)))[-1] == [6]


def test_a_truncated_file(tmp_path: Path) -> None:
    folder = tmp_path / "short"
    shutil.copytree(EMBEDDED_MODEL, folder)
    decoder, cache = with_slots(30, source=ExpertStore.of(Checkpoint.open(folder)))
    path = folder / "model.safetensors"
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 3)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: .*(truncated|was changed)"):
        decoder.forward(expected().ids[:64], DecodeState.new(decoder.config, 64, Precision.BF16))
    check_slots(cache)
