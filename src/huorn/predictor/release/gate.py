"""The gate: what must hold, to the byte, of a bank's files before they are released, and again wherever they are verified."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from huorn.errors import UsageError
from huorn.predictor.bank_files.bank_loader import to_int8
from huorn.predictor.bank_files.int8_bank import score
from huorn.predictor.bank_files.reference_scorer import Bank
from huorn.predictor.release.fixture import FIXTURE, expected, fixture_features, fixture_sets
from huorn.predictor.release.manifest import sha256_tensor
from huorn.predictor.release.native_check import check_native
from huorn.predictor.released import open_bank

# Of int8 recall against BF16, in points.
MOST_LOST_POINTS = 0.3


@dataclass(frozen=True)
class GateResult:
    """What was compared. `same_scores` is False where all bytes are right and only scores differ: another environment. Largest
    difference of BF16 scores from the fixture's, and of int8 ones; the largest share of its error bound that a number of the
    native scorer used, None for a bank without hidden states, which the engine does not run."""

    tensors: int
    int8_buffers: int
    sets: int
    same_scores: bool
    largest_score_difference: float
    int8_score_difference: float
    native_bound_used: float | None


def check_bank(folder: Path, int8_digests: Mapping[str, str]) -> tuple[Bank, GateResult]:
    """Loads the bank as data and compares int8 buffers with their checksums and scores with the fixture. UsageError by name."""
    bank = open_bank(folder)
    coded = to_int8(bank)
    for name in sorted(coded.keys() ^ int8_digests.keys()):
        raise UsageError(
            f"{folder}: int8 buffer {name} is {'new' if name in coded else 'missing'}: made by another version"
        )
    for name, tensor in coded.items():
        if sha256_tensor(tensor) != int8_digests[name]:
            raise UsageError(
                f"{folder}: the int8 buffer {name} made here is not that of the release: another version of to_int8"
            )
    worst = int8_worst = 0.0
    same, native = True, None
    try:
        sets = fixture_sets(load_file(folder / FIXTURE))
    except KeyError as error:
        raise UsageError(f"{folder / FIXTURE} lacks {error}") from error
    for raw, want in sets:
        here = expected(bank, raw)
        for name, value in want.items():
            same &= torch.equal(here[name], value)
        worst = max(worst, float((here["expected_scores"] - want["expected_scores"]).abs().max()))
        x, base = fixture_features(bank, raw)
        int8_scores, _ = score(coded, x, base)
        int8_worst = max(int8_worst, float((int8_scores - want["expected_scores"]).abs().max()))
        if bank.config.base_model.hidden_size:
            native = max(native or 0.0, check_native(coded, x, base))
    return bank, GateResult(len(bank.tensors), len(coded), len(sets), same, worst, int8_worst, native)


def compare_with_source(folder: Path, source: Bank) -> None:
    """UsageError unless every tensor, the token table and every int8 buffer are those of `source`, byte for byte."""
    bank = open_bank(folder)
    if bank.config != source.config:
        raise UsageError(f"{folder}: config.json does not read back as it was written")
    _equal(folder, bank.tensors, source.tensors)
    _equal(folder, to_int8(bank), to_int8(source))


def _equal(folder: Path, found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    for name, tensor in wanted.items():
        if found[name].dtype != tensor.dtype or sha256_tensor(found[name]) != sha256_tensor(tensor):
            raise UsageError(f"{folder}: {name} is not byte for byte what training made")


def check_recall(bf16: float, int8: float) -> None:
    """UsageError when int8 loses more than MOST_LOST_POINTS of mean recall@8."""
    if 100 * (bf16 - int8) > MOST_LOST_POINTS:
        raise UsageError(
            f"int8 has a mean recall@8 of {int8:.4f}, {100 * (bf16 - int8):.2f} points below BF16: more than "
            f"{MOST_LOST_POINTS} are "
            "not released"
        )
