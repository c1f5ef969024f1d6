"""parity_fixture.safetensors: inputs with the scores and probabilities that the BF16 scorer gave where the bank was made."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from huorn.predictor.bank_files.reference_scorer import (
    Bank,
    assemble,
    base_hidden,
    probabilities,
    raw_rows,
    scores,
    update_prior,
)

FIXTURE = "parity_fixture.safetensors"
SETS = 9  # eight tokens in mid-answer with a warmed prior, and the first step after a reset
SEED = 20250
_WARM_TOKENS = 40
_EXPECTED = ("expected_scores", "expected_probabilities")


def make_fixture(bank: Bank) -> dict[str, Tensor]:
    """`n.name` for each set n: what probabilities() takes, and what it gives."""
    generator = torch.Generator().manual_seed(SEED)
    found: dict[str, Tensor] = {}
    for number in range(SETS):
        raw = _inputs(bank, generator, first_step=number == SETS - 1)
        found |= {f"{number}.{name}": value.clone() for name, value in (raw | expected(bank, raw)).items()}
    return found


def fixture_sets(fixture: Mapping[str, Tensor]) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """(inputs, expected values) of each set. KeyError when one is missing."""
    found = []
    for number in range(SETS):
        mine = {name[2:]: value for name, value in fixture.items() if name.startswith(f"{number}.")}
        want = {name: mine.pop(name) for name in _EXPECTED}
        found.append((mine, want))
    return found


def expected(bank: Bank, raw: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What the BF16 scorer says here."""
    config = bank.config
    x, base = fixture_features(bank, raw)
    return {
        "expected_scores": scores(bank, x[None], base[None])[0],
        "expected_probabilities": probabilities(
            bank, raw, config.base_model.num_experts, config.features.ema_beta
        ),
    }


def fixture_features(bank: Bank, raw: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """BF16 x [H, F] and f16 base [H, D] of one set."""
    config = bank.config
    rows = raw_rows(bank, raw, config.features.ema_beta)
    x = assemble(config.features, config.heads.layers, rows, bank.tensors["token_table"])
    return x[0], base_hidden(config.heads.layers, rows)[0]


def _inputs(bank: Bank, generator: torch.Generator, first_step: bool) -> dict[str, Tensor]:
    """Random numbers of the right kinds; routed experts are drawn without repetition."""
    base, layers = bank.config.base_model, bank.config.heads.layers
    count, experts = base.num_layers, base.num_experts

    def draw_experts() -> Tensor:
        return (
            torch.rand(count, experts, generator=generator)
            .argsort(1)[:, : base.experts_per_token]
            .contiguous()
        )

    prior = torch.zeros(len(layers), experts)
    for _ in range(0 if first_step else _WARM_TOKENS):
        prior = update_prior(prior, draw_experts()[list(layers)], bank.config.features.ema_beta)
    step = 0 if first_step else int(torch.randint(1, 256, (), generator=generator))
    most = max(1, bank.config.features.token_rows)
    token, next_token = torch.randint(0, most, (2,), generator=generator)
    return {
        "hidden": torch.randn(count, base.hidden_size, generator=generator).to(torch.float16),
        "router_logits": torch.randn(count, experts, generator=generator).to(torch.float16),
        "routed": draw_experts(),
        "previous": torch.full((count, base.experts_per_token), -1) if first_step else draw_experts(),
        "prior": prior,
        "step": torch.tensor(step),
        "token": token,
        "next_token": next_token,
    }
