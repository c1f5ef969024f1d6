"""Feature profiles: `card` as the published bank, `huorn` with what measured better, `routing` for traces without states."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from huorn.errors import UsageError
from huorn.predictor.bank_files.spec import BLOCKS, Block, FeatureContract

BETA = 0.9
CARD_WIDTH, WIDTH = 32, 256
SEED = 1234
ROUTING_BLOCKS: tuple[Block, ...] = ("win", "prior", "pos", "prevwin", "sticky")
PROFILES = ("huorn", "card", "routing")


def make_contract(
    profile: str,
    text_tokens: int,
    hidden: int,
    uncaptured: tuple[int, ...] = (),
    without: tuple[str, ...] = (),
) -> FeatureContract:
    """The contract of a profile for a model with `text_tokens` ids and hidden size `hidden`; `without` names blocks to leave out.

    UsageError for a name that is not known.
    """
    if profile not in PROFILES:
        raise UsageError(f"--profile {profile} is not known; give one of {', '.join(PROFILES)}")
    wrong = [name for name in without if name not in BLOCKS]
    if wrong:
        raise UsageError(f"--without {wrong[0]} is no block of features; they are {', '.join(BLOCKS)}")
    card, routing = profile == "card", profile == "routing"
    blocks = tuple(block for block in (ROUTING_BLOCKS if routing else BLOCKS) if block not in without)
    if not blocks:
        raise UsageError("--without leaves no features")
    return FeatureContract(
        profile=profile,  # type: ignore[arg-type]  # one of PROFILES
        blocks=blocks,
        ema_beta=BETA,
        position_scale=256,
        # The card's bank saw 256 tokens; beyond them its input grows without end, in huorn's it stays where training ended.
        position_limit=None if card else 256,
        token_source="random" if card else "embedding",
        token_rows=0 if routing else text_tokens,
        token_width=0 if routing else CARD_WIDTH if card else min(WIDTH, hidden),
        token_seed=SEED,
        first_step="expert_zero" if card else "none",
        uncaptured_logits=uncaptured,
    )


def token_table(contract: FeatureContract, embedding: Iterable[Tensor] = ()) -> Tensor:
    """BF16 [rows, width]: drawn numbers, or the model's embedding, given as pieces [n, D] of its rows, through one random
    projection with orthogonal columns, scaled so that entries have mean square 1, as drawn ones have."""
    shape = contract.token_rows, contract.token_width
    generator = torch.Generator().manual_seed(contract.token_seed)
    if contract.token_source == "random" or not shape[1]:
        return torch.randn(shape, generator=generator).to(torch.bfloat16)
    columns, rows = torch.empty(0), list[Tensor]()
    for piece in embedding:
        if not len(columns):
            drawn = torch.randn(piece.shape[1], shape[1], generator=generator, dtype=torch.float64)
            columns = torch.linalg.qr(drawn)[0].float()
        rows.append(piece.float() @ columns)
    table = torch.cat(rows)[: shape[0]]
    return (table / table.square().mean().sqrt()).to(torch.bfloat16)
