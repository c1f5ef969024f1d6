"""Features against loops in numpy that follow the published list, and what they must not see."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from huorn.predictor.bank_files.reference_scorer import Rows, assemble, base_hidden
from huorn.predictor.dataset import HeadRows, load_rows
from huorn.predictor.profiles import make_contract, token_table
from huorn.trace.recording import Traces
from tests.predictor.made_traces import Made, Shape, make, splits_of, write

CARD = make_contract("card", 40, 16)
HUORN = make_contract("huorn", 40, 16)


def oracle(made: Made, layer: int, row: int, first_step: str, limit: float, table: np.ndarray) -> np.ndarray:
    """The card's list, one row and one head, block by block."""
    shape = made.shape
    start = max(s for s in made.starts if s <= row)
    step = row - start

    def hot(at: int, where: int) -> np.ndarray:
        out = np.zeros(shape.experts)
        if where < 0:
            return out
        if at < start:
            if first_step == "expert_zero":
                out[0] = 1
            return out
        out[made.ids[where, at]] = 1
        return out

    prior = np.zeros(shape.experts, np.float32)
    for at in range(start, row + 1):
        prior = np.float32(0.9) * prior + np.float32(1.0 - 0.9) * hot(at, layer).astype(np.float32)
    h = made.hidden[layer, row]
    zeros = np.zeros(shape.experts)
    parts = [
        h,
        *[hot(row, layer - back) for back in (1, 2, 3)],
        prior.astype(np.float16),
        [min(step + 1, limit) / 256],
        *[made.logits[layer - back, row] if layer >= back else zeros for back in (1, 2, 3)],
        *[hot(row - 1, layer - back) for back in (1, 2, 3, 4, 5)],
        h - made.hidden[layer - 1, row] if layer else np.zeros(shape.hidden),
        hot(row, layer),
        table[made.token[row]],
        table[made.next_token[row]],
    ]
    return np.concatenate([np.asarray(part, dtype=np.float32) for part in parts])


def all_rows(made: Made, layer: int, folder: Path) -> HeadRows:
    return load_rows(Traces.open(write(made, folder)), layer, "train", 0.9)


@pytest.mark.parametrize("layer", range(7))
@pytest.mark.parametrize(("contract", "limit"), [(CARD, 1e9), (HUORN, 256.0)])
def test_every_block_is_as_listed(layer: int, contract: object, limit: float, tmp_path: Path) -> None:
    made = make([5, 3, 300], splits_of(3, 0, 0), seed=layer)
    rows = all_rows(made, layer, tmp_path / "t")
    table = token_table(contract, [torch.randn(40, 16)])  # type: ignore[arg-type]
    x = assemble(contract, [layer], rows.rows(torch.arange(len(rows))), table)[:, 0]  # type: ignore[arg-type]
    first_step = contract.first_step  # type: ignore[attr-defined]
    for row in [0, 1, 4, 5, 7, 8, 9, 263, 264, 300, 307]:
        want = torch.from_numpy(oracle(made, layer, row, first_step, limit, table.float().numpy()))
        assert torch.equal(x[row], want.to(torch.bfloat16)), row


def test_card_has_the_published_width() -> None:
    from huorn.predictor.bank_files.spec import BaseModelShape

    base = BaseModelShape(
        repo="", revision="", fingerprint="", num_layers=40, num_experts=256, experts_per_token=8, hidden_size=2048,
        vocab_size=248_320,
    )  # fmt: skip
    contract = make_contract("card", 248_070, 2048)
    assert contract.width(base) == 7489
    table = token_table(contract)
    assert table.shape == (248_070, 32)
    generator = torch.Generator().manual_seed(1234)
    assert torch.equal(table, torch.randn(248_070, 32, generator=generator).to(torch.bfloat16))


def test_uncaptured_logits_are_zeros(tmp_path: Path) -> None:
    made = make([9], splits_of(1, 0, 0))
    rows = all_rows(made, 6, tmp_path / "t")
    contract = make_contract("card", 40, 16, uncaptured=(5,))
    at = torch.arange(9)
    table = token_table(contract)
    with_all, without = (
        assemble(c, [6], rows.rows(at), table)[:, 0] for c in (make_contract("card", 40, 16), contract)
    )
    first = 16 + 3 * 12 + 12 + 1
    assert bool((without[:, first : first + 12] == 0).all())
    assert not bool((with_all[:, first : first + 12] == 0).any())
    kept = [i for i in range(with_all.shape[1]) if not first <= i < first + 12]
    assert torch.equal(with_all[:, kept], without[:, kept])


def test_a_batch_is_its_rows_and_heads_together_are_each_alone(tmp_path: Path) -> None:
    made = make([6, 7], splits_of(2, 0, 0), seed=3)
    traces = Traces.open(write(made, tmp_path / "t"))
    table = token_table(CARD)
    alone = []
    for layer in range(7):
        rows = load_rows(traces, layer, "train", 0.9)
        whole = assemble(CARD, [layer], rows.rows(torch.arange(13)), table)
        each = [assemble(CARD, [layer], rows.rows(torch.tensor([row])), table) for row in range(13)]
        assert torch.equal(whole, torch.cat(each))
        alone.append(whole[:, 0])
    some = [load_rows(traces, layer, "train", 0.9) for layer in range(7)]
    previous = np.where(np.isin(np.arange(13), made.starts)[None, :, None], -1, np.roll(made.ids, 1, axis=1))
    together = Rows(
        layers=range(7), hidden_layers=range(7), hidden=torch.from_numpy(made.hidden.transpose(1, 0, 2).copy()),
        router_logits=torch.from_numpy(made.logits.transpose(1, 0, 2).copy()),
        routed=torch.from_numpy(made.ids.transpose(1, 0, 2).copy()),
        previous=torch.from_numpy(previous.transpose(1, 0, 2).copy()),
        prior=torch.stack([rows.prior for rows in some], 1), step=some[0].step, token=some[0].token,
        next_token=some[0].next_token,
    )  # fmt: skip
    assert torch.equal(assemble(CARD, range(7), together, table), torch.stack(alone, 1))
    assert torch.equal(base_hidden(range(7), together)[:, 4], torch.from_numpy(made.hidden[4]))


def test_ids_without_a_row_are_refused(tmp_path: Path) -> None:
    made = make([4], splits_of(1, 0, 0))
    rows = all_rows(made, 2, tmp_path / "t")
    contract = make_contract("card", 30, 16)
    table = token_table(contract)
    seen = rows.rows(torch.arange(1))
    for field in ("token", "next_token"):
        for wrong in (30, -1):
            bad = Rows(
                **{
                    **vars(seen),
                    "token": torch.tensor([0]),
                    "next_token": torch.tensor([0]),
                    field: torch.tensor([wrong]),
                }
            )
            with pytest.raises(ValueError, match=f"token id {wrong} has no row"):
                assemble(contract, [2], bad, table)


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_nothing_of_another_prompt_or_of_the_future_is_seen(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Changing rows of another prompt, or later rows of the same one, changes neither features nor the targets before them."""
    counts = data.draw(st.lists(st.integers(2, 20), min_size=2, max_size=4))
    layer, seed = data.draw(st.integers(0, 6)), data.draw(st.integers(0, 99))
    prompt = data.draw(st.integers(0, len(counts) - 1))
    made = make(counts, splits_of(len(counts), 0, 0), seed=seed)
    other = make(counts, splits_of(len(counts), 0, 0), seed=seed + 1000)
    first = int(made.starts[prompt])
    row = data.draw(st.integers(first, first + counts[prompt] - 1))
    mixed = make(counts, splits_of(len(counts), 0, 0), seed=seed)
    for name in ("hidden", "logits", "ids"):
        values, strange = getattr(mixed, name), getattr(other, name)
        values[:, :first], values[:, row + 1 :] = strange[:, :first], strange[:, row + 1 :]
    mixed.token[:first], mixed.token[row + 1 :] = other.token[:first], other.token[row + 1 :]
    mixed.next_token[:first], mixed.next_token[row + 1 :] = (
        other.next_token[:first],
        other.next_token[row + 1 :],
    )
    folder = tmp_path_factory.mktemp("t")
    table = token_table(CARD)
    at = torch.arange(first, row + 1)
    seen = [
        assemble(CARD, [layer], all_rows(one, layer, folder / str(number)).rows(at), table)
        for number, one in enumerate((made, mixed))
    ]
    assert torch.equal(*seen)


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_targets_stay_in_their_prompt(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    counts = data.draw(
        st.lists(st.integers(1, 24), min_size=2, max_size=4).filter(lambda some: max(some) > 1)
    )
    made = make(counts, splits_of(len(counts), 0, 0), Shape(layers=2), seed=data.draw(st.integers(0, 99)))
    rows = all_rows(made, 1, tmp_path_factory.mktemp("t") / "t")
    ends = {int(s) + c - 1 for s, c in zip(made.starts, counts, strict=True)}
    assert rows.usable.tolist() == [row for row in range(sum(counts)) if row not in ends]
    got = rows.targets(rows.usable, (1, 4, 16))
    for number, row in enumerate(rows.usable.tolist()):
        end = min(e for e in ends if e >= row)
        for group, horizon in enumerate((1, 4, 16)):
            want = {
                int(e) for later in range(row + 1, min(row + horizon, end) + 1) for e in made.ids[1, later]
            }
            assert set(torch.nonzero(got[number, group])[:, 0].tolist()) == want
    assert rows.routed_next(rows.usable).tolist() == [
        made.ids[1, row + 1].tolist() for row in rows.usable.tolist()
    ]
