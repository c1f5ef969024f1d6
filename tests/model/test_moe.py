"""Routing and the MoE block: ties by hand, experts against a loop over tokens in float64."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import FrozenInstanceError

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from huorn.checkpoint.weight import Weight
from huorn.model.linear import Linear
from huorn.model.moe import ExpandedExpert, MoeBlock, Routing, combine, route
from huorn.model.precision import Precision

HIDDEN, WIDTH, EXPERTS = 10, 6, 9


class Recorded:
    """A provider over given experts that remembers what it was asked for."""

    def __init__(self, experts: list[ExpandedExpert]) -> None:
        self.experts = experts
        self.asked: list[list[int]] = []

    def ready(self, layer: int, expert_ids: Sequence[int]) -> Iterable[ExpandedExpert]:
        assert layer == 3
        self.asked.append(list(expert_ids))
        return (self.experts[expert_id] for expert_id in expert_ids)


def random_block(top_k: int) -> tuple[MoeBlock, Recorded]:
    generator = torch.Generator().manual_seed(top_k)

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator)

    def linear(*matrices: Tensor) -> Linear:
        return Linear([Weight(m) for m in matrices], Precision.F32, expand=True)

    experts = [ExpandedExpert(matrix(2 * WIDTH, HIDDEN), matrix(HIDDEN, WIDTH)) for _ in range(EXPERTS)]
    provider = Recorded(experts)
    block = MoeBlock(
        layer=3,
        top_k=top_k,
        precision=Precision.F32,
        router=linear(matrix(EXPERTS, HIDDEN)),
        experts=provider,
        shared_in=linear(matrix(4, HIDDEN), matrix(4, HIDDEN), matrix(1, HIDDEN)),
        shared_down=linear(matrix(HIDDEN, 4)),
    )
    return block, provider


def by_token(block: MoeBlock, experts: list[ExpandedExpert], x: Tensor) -> Tensor:
    """The definition, one token and one expert at a time, in float64."""

    def expert(gate: Tensor, up: Tensor, down: Tensor, column: Tensor) -> Tensor:
        return down @ (F.silu(gate @ column) * (up @ column))

    def stored(linear: Linear) -> Tensor:
        assert linear.expanded is not None
        return linear.expanded.double()

    gate, up, switch = stored(block.shared_in).split([4, 4, 1])
    rows = []
    for column in x.double():
        probabilities = (stored(block.router) @ column).softmax(0)
        chosen = probabilities.argsort(descending=True)[: block.top_k].tolist()
        row = torch.sigmoid(switch @ column) * expert(gate, up, stored(block.shared_down), column)
        for e in chosen:
            weight = probabilities[e] / sum(probabilities[other] for other in chosen)
            row = row + weight * expert(
                experts[e].gate_up[:WIDTH].double(),
                experts[e].gate_up[WIDTH:].double(),
                experts[e].down.double(),
                column,
            )
        rows.append(row)
    return torch.stack(rows)


@pytest.mark.parametrize("top_k", [1, 2, 8, EXPERTS])
@pytest.mark.parametrize("tokens", [1, 2, 17])
def test_block_against_a_loop_over_tokens(top_k: int, tokens: int) -> None:
    block, provider = random_block(top_k)
    x = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(tokens))
    exact = by_token(block, provider.experts, x)
    assert torch.allclose(block(x).double(), exact, rtol=0, atol=1e-5 * float(exact.abs().max()))


def test_each_expert_is_asked_for_once_per_call() -> None:
    block, provider = random_block(2)
    block(torch.randn(50, HIDDEN, generator=torch.Generator().manual_seed(0)))
    assert len(provider.asked) == 1
    assert len(set(provider.asked[0])) == len(provider.asked[0]) > 2


def test_ties_break_by_lower_expert_id() -> None:
    logits = torch.tensor(
        [
            [1.0, 3.0, 3.0, 2.0, 3.0, 2.0],
            [0.0, 0.0, 0.0, 0.0, 0.0, 0.0],
            [-5.0, 2.0, -5.0, 2.0, 7.0, 2.0],
        ]
    )
    assert route(logits, 2).ids.tolist() == [[1, 2], [0, 1], [4, 1]]
    assert route(logits, 4).ids.tolist() == [[1, 2, 4, 3], [0, 1, 2, 3], [4, 1, 3, 5]]


def test_ties_break_by_lower_expert_id_in_wide_rows() -> None:
    """256 experts go through another sort than 6 do."""
    logits = torch.arange(256).remainder(4).float().expand(5, 256)
    assert route(logits, 8).ids.tolist() == [[3, 7, 11, 15, 19, 23, 27, 31]] * 5


def test_larger_logit_wins_where_softmax_rounds_to_one_probability() -> None:
    logits = torch.tensor([[0.0, -110.0, -109.0]])
    assert logits.softmax(-1)[0, 1:].tolist() == [0.0, 0.0]
    assert route(logits, 2).ids.tolist() == [[0, 2]]


def test_routing_weights() -> None:
    routing = route(torch.tensor([[0.0, 1.0, 2.0, 3.0]]), 2)
    e = torch.tensor(1.0, dtype=torch.float64).exp()
    assert routing.ids.dtype == torch.int32
    assert routing.weights.dtype == torch.float32
    assert torch.allclose(routing.weights.double(), torch.stack((e / (1 + e), 1 / (1 + e)))[None])
    with pytest.raises(FrozenInstanceError):
        routing.ids = routing.ids  # type: ignore[misc]


def test_combine_adds_in_rank_order_in_f32() -> None:
    """1e8 + 1 - 1e8 is 0 in F32 in this order and 1 in any order that adds the large ones first."""
    outputs = torch.tensor([[[1e8], [1.0], [-1e8]]])
    assert combine(outputs, torch.ones(1, 3)).tolist() == [[0.0]]
    assert combine(outputs[:, [0, 2, 1]], torch.ones(1, 3)).tolist() == [[1.0]]
    assert isinstance(Routing(torch.zeros(1, 3), torch.ones(1, 3)), Routing)
