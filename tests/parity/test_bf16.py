"""BF16 operands cost no more than transformers' own BF16 run costs: about half of it.

Both are compared with transformers in F32 on the same weights, which are BF16 numbers. The error of a token is the root
mean square over its logits. In either run rounding sends a few tokens to other experts, where the error is a hundred
times larger, so errors are pooled over several models of a shape, and taken both as mean and as median.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from huorn.checkpoint.reader import Checkpoint
from huorn.model.load import load_decoder
from huorn.model.precision import Precision

from .oracle import CASES, Case, oracle_logits, random_model, random_tokens, run_pieces, save, token_errors


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_error_is_at_most_that_of_transformers(case: Case, tmp_path: Path) -> None:
    ours, theirs = [], []
    models = (
        2 if case.name == "seedling-like" else 6
    )  # eight layers of 64 experts take long to save, and average more
    for seed in range(models):
        variant = replace(case, seed=case.seed + 100 * seed)
        model = random_model(variant).to(torch.bfloat16)
        tokens = random_tokens(variant, 96)
        reference = oracle_logits(copy.deepcopy(model).float(), tokens)
        decoder = load_decoder(Checkpoint.open(save(model, tmp_path / str(seed))), Precision.BF16)
        pieces = run_pieces(decoder, tokens, [64, 1, 2, 3, *[1] * 6, 20])
        ours.append(token_errors(pieces, reference))
        theirs.append(token_errors(oracle_logits(model, tokens), reference))
    all_ours, all_theirs = torch.cat(ours), torch.cat(theirs)
    assert all_ours.mean() <= all_theirs.mean()
    assert 0 < all_ours.median() <= all_theirs.median()
