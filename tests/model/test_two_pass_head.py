"""The two-pass lm_head against the full product: the same tokens, the same logits to the bit, from fewer bytes.

The full product is that of a weight in RAM (FullHead), which shares no code with bounds, candidates or the file.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from huorn import _native
from huorn.checkpoint import row_table
from huorn.checkpoint.row_table import RowTable
from huorn.checkpoint.safetensors_file import SafetensorsFile
from huorn.checkpoint.weight import Weight
from huorn.engine.sampling import Sampler, SamplingSettings
from huorn.errors import CheckpointError, HuornError
from huorn.kernels.isa import ALL, available
from huorn.kernels.operand import Operand
from huorn.model import two_pass_head
from huorn.model.head import FullHead, Norm
from huorn.model.next_token import Adjustment, FullLogits, NextToken
from huorn.model.two_pass_head import TwoPassHead

FASTEST = available()[-1]


@pytest.fixture(scope="module", params=ALL)
def runtime(request: pytest.FixtureRequest) -> _native.Runtime:
    if request.param not in available():
        pytest.skip(f"this CPU has no {request.param}")
    return _native.Runtime(2, request.param)


@dataclass(frozen=True)
class Heads:
    """One weight [V, D] as both heads."""

    two_pass: TwoPassHead
    full: FullHead
    runtime: _native.Runtime

    @classmethod
    def of(cls, runtime: _native.Runtime, weight: Tensor, folder: Path, seed: int = 0) -> Heads:
        file = folder / f"{runtime.isa}-{random.getrandbits(64):x}.safetensors"
        save_file({"pad": torch.zeros(5), "lm_head.weight": weight}, file)
        opened = SafetensorsFile(file)
        table = RowTable(opened, opened.infos["lm_head.weight"])
        rows, cols = weight.shape
        norm = Norm(1 + 0.3 * normal(cols, seed=seed), 1e-6)
        room = torch.empty(-(-8 * rows // 4096) * 4096 + rows * cols, dtype=torch.uint8)
        two_pass = TwoPassHead.build(table, norm, runtime, room)
        return cls(two_pass, FullHead(Operand.of(Weight(weight), f32=False), norm), runtime)

    def tokens(self, x: Tensor) -> list[tuple[NextToken, NextToken]]:
        """The next token of each row of x, in two passes and in full."""
        ours, theirs = (head.next_tokens(self.runtime, x, 16) for head in (self.two_pass, self.full))
        return list(zip(ours, theirs, strict=True))


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape) + seed))


# ---- weights and hidden states that make it hard ----


def weight_of(kind: str, rows: int, cols: int) -> Tensor:
    """bf16 [V, D]."""
    weight = normal(rows, cols)
    if kind == "duplicates":  # each row eight times, all over the vocabulary
        weight = weight[torch.arange(rows) % (rows // 8)]
    elif kind == "near ties":  # rows that differ in the last bit of one weight
        weight = weight[torch.arange(rows) % 50].bfloat16()
        places = torch.arange(rows), torch.arange(rows) * 7 % cols
        weight[places] = (weight[places].view(torch.int16) + (torch.arange(rows) % 3 - 1).short()).view(
            torch.bfloat16
        )
    elif kind == "zero rows":
        weight[torch.arange(rows) % 5 != 0] = 0
    elif kind == "scales":
        weight *= 2.0 ** torch.linspace(-110, 20, rows)[:, None]
    elif kind == "tiny":
        weight *= 2.0**-120
    elif kind == "heavy tails":  # most weights of a row lie within half a step of its codes
        weight = weight**7
    elif kind == "one outlier":
        weight[:, 3] = 100 * normal(rows, seed=5)
    elif kind == "negative":  # all logits below 0 for a positive hidden state
        weight = -weight.abs()
    return weight.bfloat16()


def states_of(kind: str, count: int, cols: int, seed: int) -> Tensor:
    """f32 [count, D]."""
    x = normal(count, cols, seed=seed)
    if kind == "outliers":
        x[:, ::60] *= 1e4
    elif kind == "huge":
        x *= 1e15
    elif kind == "small":
        x *= 1e-4
    elif kind == "positive":
        x = x.abs()
    elif kind == "sparse":
        x[:, torch.arange(cols) % 7 != 0] = 0
        x[0] = 0
    return x


WEIGHTS = (
    "normal", "duplicates", "near ties", "zero rows", "scales", "tiny", "heavy tails", "one outlier", "negative",
)  # fmt: skip
STATES = ("normal", "outliers", "huge", "small", "positive", "sparse")
# 54 kinds x 200 inputs on the fastest variant: 10,800
INPUTS = 200


def settings_of(generator: random.Random) -> SamplingSettings:
    """Greedy or top-k, half of them with penalties, some of which turn the order of the vocabulary."""
    greedy, plain = generator.random() < 0.5, generator.random() < 0.5
    choose = generator.choice
    return SamplingSettings(
        temperature=0.0 if greedy else choose([0.2, 1.0, 1e300]),
        top_k=choose([1, 2, 20, 100]),
        top_p=choose([0.5, 1.0]),
        repetition_penalty=1.0 if plain else choose([0.5, 1.0, 1.3, 1e6]),
        presence_penalty=0.0 if plain else choose([-50.0, 0.0, 0.7, 100.0]),
        frequency_penalty=0.0 if plain else choose([-0.1, 0.0, 5.0]),
        seed=generator.getrandbits(32),
    )


def best_ids(logits: Tensor, count: int) -> list[int]:
    return torch.sort(logits, descending=True, stable=True).indices[:count].tolist()


@pytest.mark.parametrize("states", STATES)
@pytest.mark.parametrize("weights", WEIGHTS)
def test_the_same_tokens(runtime: _native.Runtime, weights: str, states: str, tmp_path: Path) -> None:
    """Greedy and top-k, with penalties on the very tokens that would win: every pick is that of the full product."""
    generator = random.Random(f"{weights} {states}")
    rows, cols = generator.choice([(2000, 64), (1003, 200), (3000, 130), (1500, 512)])
    heads = Heads.of(runtime, weight_of(weights, rows, cols), tmp_path)
    inputs = INPUTS if runtime.isa == FASTEST else 10
    for number, (ours, theirs) in enumerate(
        pair
        for seed in range(inputs // 10)
        for pair in heads.tokens(states_of(states, 10, cols, seed=100 * seed))
    ):
        logits = theirs.full()
        settings = settings_of(generator)
        # prompt and generated ids: the likeliest ones, and others
        prompt = best_ids(logits, generator.choice([0, 1, 3])) + generator.sample(range(rows), 20)
        generated = best_ids(logits, generator.choice([0, 2]))
        samplers = [Sampler(settings, prompt) for _ in range(2)]
        for sampler in samplers:
            for token_id in generated:
                sampler._generated[token_id] += 2
                sampler._seen.add(token_id)
        picks = samplers[0].pick(ours), samplers[1].pick(theirs)
        assert picks[0] == picks[1], number


@pytest.mark.parametrize("weights", WEIGHTS)
def test_candidates_hold_the_largest_and_all_that_tie(
    runtime: _native.Runtime, weights: str, tmp_path: Path
) -> None:
    heads = Heads.of(runtime, weight_of(weights, 2000, 130), tmp_path)
    for ours, theirs in heads.tokens(states_of("normal", 5, 130, seed=1)):
        logits = theirs.full()
        for k in (1, 3, 50, 1999, 2000):
            found = ours.largest(k)
            ids = torch.arange(2000) if found.ids is None else found.ids
            edge = logits.sort(descending=True).values[k - 1]
            assert set(torch.nonzero(logits >= edge).flatten().tolist()) <= set(ids.tolist())
            assert bool((ids[1:] > ids[:-1]).all())
            assert torch.equal(found.logits, logits[ids])  # whatever their neighbours: one order of summation


def test_full_is_the_full_product(
    runtime: _native.Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for piece_bytes in (500, 100_000, 1 << 23):
        monkeypatch.setattr(row_table, "PIECE_BYTES", piece_bytes)
        heads = Heads.of(runtime, weight_of("scales", 1003, 200), tmp_path)
        x = states_of("normal", 40, 200, seed=9)
        expected = heads.full.full(runtime, x, 16)
        assert torch.equal(heads.two_pass.full(runtime, x, 16), expected)
        assert torch.equal(heads.tokens(x[:3])[2][0].full(), expected[2])


def test_f32_weights_are_rounded_as_for_the_full_product(runtime: _native.Runtime, tmp_path: Path) -> None:
    heads = Heads.of(runtime, normal(1003, 200), tmp_path)
    for ours, theirs in heads.tokens(states_of("normal", 8, 200, seed=2)):
        found = ours.largest(5)
        assert found.ids is not None
        assert torch.equal(found.logits, theirs.full()[found.ids])


# ---- what is adjusted before the bounds ----


def test_a_mask_and_a_bias(runtime: _native.Runtime, tmp_path: Path) -> None:
    """Minus infinity for the likeliest ids, and a bonus that lifts a middling one to the top."""
    heads = Heads.of(runtime, weight_of("normal", 2000, 130), tmp_path)
    for ours, theirs in heads.tokens(states_of("normal", 20, 130, seed=1)):
        logits = theirs.full().double()
        order = best_ids(logits, 2000)
        ids = sorted([*order[:40], order[1000]])
        minus = torch.tensor([math.inf if i in order[:40] else -1000.0 for i in ids], dtype=torch.float64)
        adjustment = Adjustment(torch.tensor(ids), 1.0, minus)
        found = ours.largest(2, adjustment)
        assert found.ids is not None
        scores = found.logits.double()
        adjustment.apply(scores, found.ids)
        assert [int(found.ids[place]) for place in best_ids(scores, 2)] == [order[1000], order[40]]
        adjustment.apply(logits)
        assert torch.equal(scores, logits[found.ids])


def test_adjusting_some_is_adjusting_all() -> None:
    logits = normal(500).double()
    adjustment = Adjustment(torch.tensor([0, 3, 77, 498]), 1.7, torch.tensor([0.0, 1.5, -2.0, 0.1]).double())
    everything = logits.clone()
    adjustment.apply(everything)
    changed = torch.nonzero(everything != logits).flatten().tolist()
    assert changed == [0, 3, 77, 498]
    for ids in ([0], [1, 2], [3, 76, 78, 498, 499], [499], list(range(500))):
        some = logits[ids]
        adjustment.apply(some, torch.tensor(ids))
        assert torch.equal(some, everything[ids])


def test_adjusted_bounds_are_rounded_outwards() -> None:
    """Adjusting is done in F64, bounds are F32."""
    ends = normal(500) * 10
    ids = torch.arange(0, 500, 3)
    adjustment = Adjustment(ids, 1.7, 1e6 * normal(len(ids), seed=1).double())
    exact = ends.double()
    adjustment.apply(exact)
    for outwards, sign in ((-math.inf, -1), (math.inf, 1)):
        bound = two_pass_head._adjusted(ends, adjustment, outwards).double()
        assert (sign * (bound - exact)[ids] > 0).all()
        assert ((bound - exact).abs()[ids] <= exact.abs()[ids] * 2.0**-22).all()
        bound[ids] = exact[ids]
        assert torch.equal(bound, exact)


# ---- how much is read ----


def test_bytes_in_a_normal_case(runtime: _native.Runtime, tmp_path: Path) -> None:
    heads = Heads.of(runtime, weight_of("normal", 4000, 512), tmp_path)
    counts, x = heads.two_pass.counts, states_of("normal", 50, 512, seed=4)
    for k, share in ((1, 0.52), (20, 0.56)):
        before, rows = runtime.counters()[0], counts.rescored_rows
        for row in x.split(1):
            heads.two_pass.next_tokens(runtime, row, 1)[0].largest(k)
        read = (runtime.counters()[0] - before) / len(x)
        rescored = (counts.rescored_rows - rows) / len(x)
        assert read == 4000 * (512 + 8) + rescored * 2 * 512
        assert read <= share * 4000 * 512 * 2
        assert rescored >= k
    assert counts.tokens == 100
    assert counts.full_products == 0


def test_many_candidates_are_a_full_product(
    runtime: _native.Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(two_pass_head, "MOST_CANDIDATES", 30)
    heads = Heads.of(runtime, torch.zeros(1000, 64).bfloat16(), tmp_path)
    ((ours, theirs),) = heads.tokens(normal(1, 64))
    found = ours.largest(1)
    assert found.ids is None
    assert torch.equal(found.logits, theirs.full())
    assert heads.two_pass.counts.full_products == 1
    heads.tokens(normal(1, 64))[0][0].largest(31)  # more are wanted
    assert heads.two_pass.counts.full_products == 2


def test_a_batch_reads_the_codes_once_and_only_when_asked(runtime: _native.Runtime, tmp_path: Path) -> None:
    heads = Heads.of(runtime, weight_of("normal", 2000, 128), tmp_path)
    before = runtime.counters()[0]
    tokens = heads.two_pass.next_tokens(runtime, normal(12, 128), 12)
    assert runtime.counters()[0] == before
    for token in tokens:
        token.largest(1)
    rescored = heads.two_pass.counts.rescored_rows
    assert runtime.counters()[0] - before == 2000 * 136 + rescored * 256


# ---- damage ----


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_damaged_hidden_states_are_an_error(runtime: _native.Runtime, tmp_path: Path, bad: float) -> None:
    heads = Heads.of(runtime, weight_of("normal", 5000, 64), tmp_path)
    x = normal(1, 64)
    x[0, 5] = bad
    ((ours, _),) = heads.tokens(x)
    for settings in (SamplingSettings(), SamplingSettings(temperature=1.0, top_k=5, repetition_penalty=1.1)):
        with pytest.raises(HuornError, match="largest logit"):
            Sampler(settings, [1, 2, 3]).pick(ours)


def test_a_logit_that_overflows_on_the_way_is_an_error(runtime: _native.Runtime, tmp_path: Path) -> None:
    """The sum of row 7 passes 2^128 and comes back; that of its codes stays small, and row 9 has a large logit."""
    weight = weight_of("normal", 5000, 256)
    weight[7, :128], weight[7, 128:], weight[9] = 3e38, -3e38, 1e35
    heads = Heads.of(runtime, weight, tmp_path)
    heads.full.norm.scale.fill_(1)
    for token in heads.tokens(torch.ones(1, 256))[0]:
        with pytest.raises(HuornError, match="largest logit"):
            Sampler(SamplingSettings(), []).pick(token)


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_damaged_weights_are_refused_by_name(runtime: _native.Runtime, tmp_path: Path, bad: float) -> None:
    weight = weight_of("normal", 1000, 64)
    weight[999, 63] = bad
    with pytest.raises(CheckpointError, match=r"lm_head\.weight holds NaN or infinity"):
        Heads.of(runtime, weight, tmp_path)


def test_a_file_truncated_later_is_an_error(runtime: _native.Runtime, tmp_path: Path) -> None:
    heads = Heads.of(runtime, weight_of("normal", 1000, 64), tmp_path)
    ((ours, theirs),) = heads.tokens(normal(1, 64))
    (path,) = tmp_path.iterdir()
    with path.open("r+b") as file:
        file.truncate(1000)
    with pytest.raises(CheckpointError, match=r"inside lm_head\.weight; it was truncated"):
        ours.largest(1)
    assert torch.equal(FullLogits.of(theirs.full()).largest(3).logits, theirs.full())
