"""`huorn predictor verify`: is this the bank that was released, and does it score here as it did there?"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from huorn.errors import UsageError
from huorn.predictor.bank_files.reference_scorer import Bank
from huorn.predictor.release.gate import GateResult, check_bank
from huorn.predictor.release.manifest import check_files, read_manifest


@dataclass(frozen=True)
class Verified:
    """A bank whose files are all as released."""

    bank: Bank
    files: int
    gate: GateResult
    other_environment: str | None  # what to say where only scores differ


def verify_bank(folder: Path) -> Verified:
    """Raises UsageError naming the first file that is damaged."""
    if not folder.is_dir():
        raise UsageError(f"{folder} is no folder: name that of an expert-predictor bank")
    manifest = read_manifest(folder)
    check_files(folder, manifest)
    bank, gate = check_bank(folder, manifest["int8"])
    remark = None
    if not gate.same_scores:
        made = manifest["environment"]
        remark = (
            "other environment: all files are as released, but scores differ from the fixture by up to "
            f"{gate.largest_score_difference:.3g}, "
            f"which was made with torch {made['torch']} on {made['cpu']}"
        )
    return Verified(bank, len(manifest["files"]) + 1, gate, remark)
