"""The decoder on native kernels: logits and states are a function of the token ids alone, to the bit, for every variant.

One chain per text and variant is the reference: its tokens one by one, with the state after each. Whatever else is done with
the same tokens must give its bits.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from huorn import _native
from huorn.assets import EMBEDDED_MODEL
from huorn.checkpoint.reader import Checkpoint
from huorn.errors import CheckpointError, UsageError
from huorn.kernels.isa import ALL, available
from huorn.model.cpu_decoder import Buffers, CpuDecoder, Sequences
from huorn.model.cpu_load import load_cpu_decoder
from huorn.model.load import load_decoder
from huorn.model.precision import Precision
from huorn.model.state import DecodeState
from huorn.schedule.plan import Plan
from huorn.schedule.shapes import columns
from huorn.synth import presets
from huorn.synth.synthesize import synthesize

BOUNDARIES = (1, 2, 3, 4, 5, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 256, 300)
FASTEST = available()[-1]
CONTEXT = 320


def draws(isa: str) -> int:
    """Of each of the three properties of seedling: 201 in all on the fastest variant."""
    return 67 if isa == FASTEST else 4


def most_tokens(isa: str) -> int:
    return 300 if isa == FASTEST else 64


def random_ids(vocab_size: int, count: int, seed: int) -> Tensor:
    return torch.randint(0, vocab_size, (CONTEXT,), generator=torch.Generator().manual_seed(seed))[:count]


@dataclass(frozen=True, eq=False)
class Snapshot:
    """What a sequence of some tokens leaves behind."""

    conv: list[Tensor]
    recurrent: list[Tensor]

    @classmethod
    def of(cls, state: DecodeState) -> Snapshot:
        return cls([each.clone() for each in state.conv], [each.clone() for each in state.recurrent])


@dataclass(frozen=True, eq=False)
class Chain:
    """Tokens one by one: logits [T, V], the state after 0, 1, 2 .. of them, and the cache after all.

    The slower variants go on in pieces after 140 tokens."""

    ids: Tensor
    logits: Tensor
    after: dict[int, Snapshot]
    kv: list[tuple[Tensor, Tensor]]

    @classmethod
    def of(cls, decoder: CpuDecoder, ids: Tensor) -> Chain:
        state = DecodeState.new(decoder.config, CONTEXT, decoder.precision)
        alone = len(ids) if decoder.runtime.isa == FASTEST else min(len(ids), 140)
        ends = [*range(1, alone + 1), *(end for end in (255, 256, 300) if alone < end <= len(ids))]
        logits, after = [], {0: Snapshot.of(state)}
        for start, end in zip([0, *ends[:-1]], ends, strict=True):
            logits.append(decoder.forward(ids[start:end], state, all_logits=True))
            after[end] = Snapshot.of(state)
        kv = [(layer.keys[: len(ids)].clone(), layer.values[: len(ids)].clone()) for layer in state.kv]
        return cls(ids, torch.cat(logits), after, kv)

    def state(self, decoder: CpuDecoder, tokens: int) -> DecodeState:
        """A state that has read the first `tokens`."""
        state = DecodeState.new(decoder.config, CONTEXT, decoder.precision)
        state.position = tokens
        state.conv = tuple(each.clone() for each in self.after[tokens].conv)
        state.recurrent = tuple(each.clone() for each in self.after[tokens].recurrent)
        for layer, (keys, values) in zip(state.kv, self.kv, strict=True):
            layer.keys[:tokens], layer.values[:tokens] = keys[:tokens], values[:tokens]
        return state

    def assert_state(self, state: DecodeState, tokens: int) -> None:
        """The state is that after the first `tokens`."""
        assert state.position == tokens
        for layer, (keys, values) in zip(state.kv, self.kv, strict=True):
            assert torch.equal(layer.keys[:tokens], keys[:tokens])
            assert torch.equal(layer.values[:tokens], values[:tokens])
            assert not layer.keys[tokens:].any(), "rows of tokens that were not read"
        if tokens not in self.after:
            return
        for ours, theirs in zip(state.conv, self.after[tokens].conv, strict=True):
            assert torch.equal(ours, theirs)
        for ours, theirs in zip(state.recurrent, self.after[tokens].recurrent, strict=True):
            assert torch.equal(ours, theirs)

    def check(self, decoder: CpuDecoder, lengths: Sequence[int], start: int = 0) -> None:
        """Pieces of these lengths from token `start` on give the chain's logits, and the state behind each."""
        state, at = self.state(decoder, start), start
        for length in lengths:
            logits = decoder.forward(self.ids[at : at + length], state, all_logits=True)
            assert torch.equal(logits, self.logits[at : at + length]), (at, length)
            at += length
            self.assert_state(state, at)


@dataclass(frozen=True, eq=False)
class Model:
    """A decoder of one variant on one thread, the same on two, and chains of different texts."""

    isa: str
    one: CpuDecoder
    two: CpuDecoder
    chains: list[Chain]

    @classmethod
    def of(
        cls, folder: Path, isa: str, lengths: Sequence[int], precision: Precision = Precision.BF16
    ) -> Model:
        one = load_cpu_decoder(Checkpoint.open(folder), precision, _native.Runtime(1, isa))
        two = replace(one, runtime=_native.Runtime(2, isa))
        chains = []
        for seed, length in enumerate(lengths):
            ids = random_ids(one.config.vocab_size, length, seed)
            chains.append(Chain.of(one if isa == FASTEST else two, ids))
        return cls(isa, one, two, chains)

    def check_together(
        self, decoder: CpuDecoder, picks: Sequence[tuple[int, int, int]], all_logits: bool
    ) -> None:
        """Sequences (chain, tokens before, tokens now) in one forward give the bits of each alone."""
        chains = [self.chains[chain] for chain, _, _ in picks]
        states = [chain.state(decoder, start) for chain, (_, start, _) in zip(chains, picks, strict=True)]
        ids = [
            chain.ids[start : start + count] for chain, (_, start, count) in zip(chains, picks, strict=True)
        ]
        logits = decoder.forward_batch(Sequences(ids, states), all_logits)
        assert len(logits) == len(picks)
        for (_, start, count), chain, state, ours in zip(picks, chains, states, logits, strict=True):
            expected = chain.logits[start : start + count]
            assert torch.equal(ours, expected if all_logits else expected[-1:])
            chain.assert_state(state, start + count)


@pytest.fixture(scope="module", autouse=True)
def _one_torch_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=ALL)
def isa(request: pytest.FixtureRequest) -> str:
    if request.param not in available():
        pytest.skip(f"this CPU has no {request.param}")
    return str(request.param)


@pytest.fixture(scope="module")
def seedling(isa: str) -> Model:
    return Model.of(EMBEDDED_MODEL, isa, [300, 100 if isa == FASTEST else 60])


# ---- how a prompt is cut ----


@st.composite
def cuts(draw: st.DrawFn, most: int) -> list[int]:
    """Lengths of pieces of a prompt of 1 to `most` tokens."""
    total = draw(st.integers(1, most))
    generator = random.Random(draw(st.integers(0, 2**32)))
    lengths: list[int] = []
    while (left := total - sum(lengths)) > 0:
        lengths.append(
            min(left, generator.choice([1, 2, 3, 4, 5, 16, 17, 64, 65, generator.randint(1, most)]))
        )
    return lengths


def test_one_piece(seedling: Model) -> None:
    for count in BOUNDARIES:
        seedling.chains[0].check(seedling.two, [count])


def test_cut_at_each_boundary(seedling: Model) -> None:
    """The piece behind the cut starts from the state that the piece before it left."""
    for count in BOUNDARIES[:-1]:
        seedling.chains[0].check(seedling.two, [min(3, 300 - count), min(2, 297 - count)], start=count)


def test_one_by_one_on_two_threads(seedling: Model) -> None:
    seedling.chains[0].check(seedling.two, [1] * 30)


def test_one_thread(seedling: Model) -> None:
    for count in (2, 17, 129):
        seedling.chains[0].check(seedling.one, [count, 3])


def test_last_logits_only(seedling: Model) -> None:
    chain = seedling.chains[0]
    for start, count in ((0, 1), (0, 65), (37, 3), (128, 129)):
        state = chain.state(seedling.two, start)
        ours = seedling.two.forward(chain.ids[start : start + count], state)
        assert torch.equal(ours, chain.logits[start + count - 1 : start + count])


def test_any_cut(seedling: Model) -> None:
    @settings(max_examples=draws(seedling.isa), deadline=None)
    @given(lengths=cuts(most_tokens(seedling.isa)), threads=st.sampled_from([1, 2]))
    def check(lengths: list[int], threads: int) -> None:
        seedling.chains[0].check(seedling.one if threads == 1 else seedling.two, lengths)

    check()


# ---- how pairs are scheduled ----

MakePlan = Callable[[np.ndarray[Any, np.dtype[np.int32]]], Plan]


def planned(decoder: CpuDecoder, make: MakePlan) -> CpuDecoder:
    """The decoder with its plans made by `make`."""
    other = replace(decoder, quick_pairs=False)
    other.plan = make  # type: ignore[method-assign]
    return other


def shuffled(seed: int) -> MakePlan:
    """Buckets of any size in any order: a plan that nothing here would make."""
    generator = np.random.default_rng(seed)

    def make(ids: np.ndarray[Any, np.dtype[np.int32]]) -> Plan:
        pairs = generator.permutation(ids.size).astype(np.int32)
        pairs = pairs[np.argsort(ids.ravel()[pairs], kind="stable")]
        chunks: list[tuple[int, int, int]] = []
        for place, pair in enumerate(pairs.tolist()):
            expert = int(ids.ravel()[pair])
            if chunks and chunks[-1][0] == expert and generator.random() < 0.7:
                chunks[-1] = (expert, chunks[-1][1], chunks[-1][2] + 1)
            else:
                chunks.append((expert, place, 1))
        generator.shuffle(chunks)
        return Plan(pairs, np.array(chunks, dtype=np.int32))

    return make


def test_any_plan(seedling: Model) -> None:
    wide = st.integers(1, 64).map(lambda most: lambda ids: Plan.bucketed(ids, most))
    plans = st.one_of(st.just(Plan.per_pair), wide, st.integers(0, 1000).map(shuffled))

    @settings(max_examples=draws(seedling.isa), deadline=None)
    @given(lengths=cuts(most_tokens(seedling.isa)), make=plans, threads=st.sampled_from([1, 2]))
    def check(lengths: list[int], make: MakePlan, threads: int) -> None:
        decoder = planned(seedling.one if threads == 1 else seedling.two, make)
        seedling.chains[0].check(decoder, lengths)

    check()


@pytest.mark.parametrize("most", [1, 2, 16, 17, 64])
def test_chunks_of(seedling: Model, most: int) -> None:
    seedling.chains[0].check(planned(seedling.two, lambda ids: Plan.bucketed(ids, most)), [1, 70])


@pytest.mark.parametrize("most", [1, 3, 16, 17, 65, 128])
def test_dense_columns_do_not_show(seedling: Model, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    monkeypatch.setattr("huorn.model.cpu_decoder.columns", lambda backend, isa, use: most)
    seedling.chains[0].check(seedling.two, [66, 1, 4] if seedling.isa != FASTEST else [131, 1, 4])


# ---- sequences together ----


@st.composite
def batches(draw: st.DrawFn, isa: str) -> list[tuple[int, int, int]]:
    """1 to 16 sequences: (chain, tokens before, tokens now)."""
    longest = 40 if isa == FASTEST else 8
    picks = []
    for _ in range(draw(st.integers(1, 16))):
        chain = draw(st.integers(0, 1))
        start = draw(
            st.integers(0, 90 if isa == FASTEST else 50)
            if chain
            else st.integers(0, 280 if isa == FASTEST else 120)
        )
        room = ((100 if isa == FASTEST else 60) if chain else 300) - start
        picks.append((chain, start, min(room, draw(st.one_of(st.just(1), st.integers(1, longest))))))
    return picks


def test_any_batch(seedling: Model) -> None:
    @settings(max_examples=draws(seedling.isa), deadline=None)
    @given(picks=batches(seedling.isa), all_logits=st.booleans(), threads=st.sampled_from([1, 2]))
    def check(picks: list[tuple[int, int, int]], all_logits: bool, threads: int) -> None:
        seedling.check_together(seedling.one if threads == 1 else seedling.two, picks, all_logits)

    check()


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8, 15, 16])
def test_decode_steps_together(seedling: Model, count: int) -> None:
    picks = [(n % 2, 3 * n + n % 3, 1) for n in range(count)]
    seedling.check_together(seedling.two, picks, all_logits=False)


def test_prompts_and_decode_steps_together(seedling: Model) -> None:
    picks = [(0, 0, 65), (1, 50, 1), (0, 255, 1), (1, 0, 3), (0, 127, 2), (1, 57, 1)]
    for all_logits in (False, True):
        seedling.check_together(seedling.two, picks, all_logits)


# ---- calls that fail ----


@pytest.mark.parametrize("wrong", [-1, 4096, 1 << 40])
def test_an_id_outside_of_the_vocabulary_changes_nothing(seedling: Model, wrong: int) -> None:
    chain = seedling.chains[0]
    state, other = chain.state(seedling.two, 20), seedling.chains[1].state(seedling.two, 7)
    ids = torch.cat([chain.ids[20:25], torch.tensor([wrong])])
    with pytest.raises(UsageError, match="not in the vocabulary"):
        seedling.two.forward(ids, state)
    with pytest.raises(UsageError, match="not in the vocabulary"):
        seedling.two.forward_batch(Sequences([seedling.chains[1].ids[7:9], ids], [other, state]))
    chain.assert_state(state, 20)
    seedling.chains[1].assert_state(other, 7)
    assert torch.equal(seedling.two.forward(chain.ids[20:24], state, True), chain.logits[20:24])


def test_a_full_context_changes_nothing(seedling: Model) -> None:
    chain, state = seedling.chains[0], DecodeState.new(seedling.two.config, 8, Precision.BF16)
    seedling.two.forward(chain.ids[:6], state)
    with pytest.raises(UsageError, match="do not fit in a context of 8"):
        seedling.two.forward(chain.ids[6:9], state)
    chain.assert_state(state, 6)
    assert torch.equal(seedling.two.forward(chain.ids[6:8], state, True), chain.logits[6:8])
    with pytest.raises(UsageError, match="do not fit in a context of 8"):
        seedling.two.forward(chain.ids[8:9], state)
    chain.assert_state(state, 8)


def test_no_tokens_change_nothing(seedling: Model) -> None:
    state = seedling.chains[0].state(seedling.two, 3)
    with pytest.raises(UsageError, match="no tokens"):
        seedling.two.forward(torch.empty(0, dtype=torch.int64), state)
    seedling.chains[0].assert_state(state, 3)


@pytest.mark.parametrize("layer", [0, 3, 7])
def test_a_damaged_expert_half_way_changes_nothing(seedling: Model, layer: int) -> None:
    class Damaged:
        quick = False
        resident = False

        def __init__(self) -> None:
            self.format = seedling.one.experts.format

        def addresses(self, layer: int) -> Tensor:
            return seedling.one.experts.addresses(layer)

        def used(self, number: int, ids: np.ndarray[Any, np.dtype[np.int32]]) -> None:
            raise AssertionError("every layer call asks")

        def waves(self, number: int, ids: np.ndarray[Any, np.dtype[np.int32]]) -> Iterator[list[int]]:
            if number == layer:
                raise CheckpointError("an expert is damaged")
            yield np.unique(ids).tolist()

    chain, state = seedling.chains[0], seedling.chains[0].state(seedling.two, 20)
    for count in (1, 9):
        with pytest.raises(CheckpointError):
            replace(seedling.two, experts=Damaged()).forward(chain.ids[20 : 20 + count], state)
        for layer_kv in state.kv:  # free rows may hold anything
            layer_kv.keys[20:] = 0
        chain.assert_state(state, 20)
    assert torch.equal(seedling.two.forward(chain.ids[20:29], state, True), chain.logits[20:29])
    chain.assert_state(state, 29)


def test_a_state_is_only_written_again_when_given_back(seedling: Model) -> None:
    """Somebody goes back to the state after 10 tokens, as a conversation does."""
    chain, state = seedling.chains[0], seedling.chains[0].state(seedling.two, 10)
    conv, recurrent = state.conv, state.recurrent
    for token in chain.ids[10:15].split(1):
        seedling.two.forward(token, state)
    chain.assert_state(state, 15)
    state.position, state.conv, state.recurrent = 10, conv, recurrent
    assert torch.equal(seedling.two.forward(chain.ids[10:15], state, True), chain.logits[10:15])


# ---- what is read ----


class Recorder:
    """A step that notes the weight bytes of each run_plan."""

    def __init__(self, step: _native.Step, runtime: _native.Runtime, read: list[int]) -> None:
        self._step, self._runtime, self._read = step, runtime, read

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._step, name)
        if name != "run_plan":
            return found

        def run_plan(*arguments: Any) -> None:
            before = self._runtime.counters()[0]
            found(*arguments)
            self._read.append(self._runtime.counters()[0] - before)

        return run_plan


@pytest.mark.parametrize(("tokens", "most"), [(1, 1), (5, 3), (64, 1), (64, 16), (130, 7), (130, 64)])
def test_weight_bytes_of_a_bucketed_plan(
    seedling: Model, tokens: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, chain, make_step = seedling.one.config, seedling.chains[0], Buffers.step
    seen, read = list[np.ndarray[Any, np.dtype[np.int32]]](), list[int]()

    def make(ids: np.ndarray[Any, np.dtype[np.int32]]) -> Plan:
        seen.append(ids.copy())
        return Plan.bucketed(ids, most)

    def step(buffers: Buffers, runtime: _native.Runtime, lengths: list[int], wide: int) -> Recorder:
        return Recorder(make_step(buffers, runtime, lengths, wide), runtime, read)

    monkeypatch.setattr(Buffers, "step", step)
    decoder = planned(seedling.two, make)
    decoder.forward(chain.ids[:tokens], chain.state(decoder, 0))
    expert = 3 * config.hidden_size * config.moe_intermediate_size  # one byte per weight
    shared = 3 * config.hidden_size * config.shared_expert_intermediate_size
    wide = min(tokens, columns("cpu", seedling.isa, "dense"))
    assert len(read) == len(seen) == config.num_hidden_layers
    for spent, ids in zip(read, seen, strict=True):
        counts = np.unique(ids, return_counts=True)[1]
        passes = sum(-(-int(count) // most) for count in counts)
        assert spent == passes * expert + -(-tokens // wide) * shared


def test_state_bytes_of_a_token(seedling: Model) -> None:
    """Every linear layer reads its memory, every full layer the rows of its cache up to the token."""
    config, chain, runtime = seedling.one.config, seedling.chains[0], seedling.two.runtime
    state = chain.state(seedling.two, 40)
    before = runtime.counters()[1]
    seedling.two.forward(chain.ids[40:41], state)
    memory = 4 * config.linear_num_value_heads * config.linear_key_head_dim * config.linear_value_head_dim
    row = 2 * 2 * config.num_key_value_heads * config.head_dim
    expected = config.num_linear_layers * memory + config.num_full_layers * 41 * row
    assert runtime.counters()[1] - before == expected


# ---- other models ----


@pytest.fixture(scope="module")
def f32(isa: str) -> Model:
    return Model.of(EMBEDDED_MODEL, isa, [30, 12], Precision.F32)


def test_f32(f32: Model) -> None:
    f32.chains[0].check(f32.two, [30])
    f32.chains[0].check(f32.two, [1, 2, 3, 17, 7])
    f32.chains[0].check(planned(f32.one, Plan.per_pair), [17])
    f32.chains[0].check(planned(f32.two, shuffled(1)), [30])
    f32.check_together(f32.two, [(0, 3, 20), (1, 7, 1), (1, 0, 12), (0, 29, 1)], all_logits=True)


@pytest.fixture(scope="session")
def wide_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The 35B shape with two layers, 16 experts and 520 tokens, in FP8: 230 MB with the draft head, which nobody reads."""
    released = presets.find_preset("qwen3.5-35b-a3b-fp8").config
    small = {
        "num_hidden_layers": 2,
        "layer_types": ("linear_attention", "full_attention"),
        "num_experts": 16,
        "vocab_size": 520,
    }
    preset = presets.Preset("wide", released.model_copy(update=small))
    folder = tmp_path_factory.mktemp("models") / "wide"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(presets.PRESETS, "wide", preset)
        synthesize("wide", folder, None, 5, lambda done, total: None)
    return folder


@pytest.fixture(scope="module")
def wide(isa: str, wide_folder: Path) -> Model:
    return Model.of(wide_folder, isa, [130, 20] if isa == FASTEST else [20, 9])


def test_full_width_cuts(wide: Model) -> None:
    total = len(wide.chains[0].ids)
    wide.chains[0].check(wide.two, [total])
    wide.chains[0].check(wide.two, [1, 2, 17])
    wide.chains[0].check(wide.one, [7])


def test_full_width_plans(wide: Model) -> None:
    for make in (
        Plan.per_pair,
        lambda ids: Plan.bucketed(ids, 1),
        lambda ids: Plan.bucketed(ids, 5),
        shuffled(2),
    ):
        wide.chains[0].check(planned(wide.two, make), [20 if wide.isa == FASTEST else 9])


def test_full_width_batch(wide: Model) -> None:
    wide.check_together(wide.two, [(0, 3, 17), (1, 7, 1), (1, 0, 5), (0, 19, 1)], all_logits=True)
    wide.check_together(wide.two, [(n % 2, n % 9, 1) for n in range(16)], all_logits=False)


def test_full_width_random_cuts(wide: Model) -> None:
    @settings(max_examples=15 if wide.isa == FASTEST else 2, deadline=None)
    @given(lengths=cuts(len(wide.chains[0].ids)))
    def check(lengths: list[int]) -> None:
        wide.chains[0].check(wide.two, lengths)

    check()


@pytest.fixture(scope="session")
def wide_reference(wide_folder: Path) -> Tensor:
    """The PyTorch decoder's logits of the first 20 tokens."""
    decoder = load_decoder(Checkpoint.open(wide_folder), Precision.BF16, expand_limit_bytes=0)
    ids = random_ids(decoder.config.vocab_size, 20, seed=0)
    return decoder.forward(ids, DecodeState.new(decoder.config, 20, Precision.BF16), all_logits=True)


def test_full_width_is_close_to_the_reference(wide: Model, wide_reference: Tensor) -> None:
    """Equal bits could all be wrong. What a variant gets wrong at this width alone would show here."""
    errors = (wide.chains[0].logits[:20] - wide_reference).norm(dim=1) / wide_reference.norm(dim=1)
    assert float(errors.median()) <= 0.02
