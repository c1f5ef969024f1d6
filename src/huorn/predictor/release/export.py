"""From a bank to its folder: files are written beside the final place, pass the gate there, and are then moved in one step."""

from __future__ import annotations

import platform
import secrets
import shutil
from collections.abc import Mapping
from importlib.resources import files as package_files
from pathlib import Path

import torch
from safetensors.torch import save

from huorn.errors import UsageError, reason
from huorn.machine.facts import cpu_model
from huorn.predictor.bank_files.bank_loader import CONFIG, MODEL, to_int8
from huorn.predictor.bank_files.reference_scorer import Bank
from huorn.predictor.evaluate import Evaluation
from huorn.predictor.release.card import card_text, draw_recall
from huorn.predictor.release.fixture import FIXTURE, make_fixture
from huorn.predictor.release.gate import GateResult, check_bank, check_recall, compare_with_source
from huorn.predictor.release.manifest import MANIFEST, manifest_text, sha256_file, sha256_tensor

PYTHON_FILES = ("spec.py", "reference_scorer.py", "int8_bank.py", "bank_loader.py")
_PACKAGE = "huorn.predictor.bank_files"


def released_source(name: str) -> str:
    """One of PYTHON_FILES as it stands in a bank's folder: it imports its neighbours instead of huorn."""
    source = (package_files(_PACKAGE) / name).read_text(encoding="utf-8")
    return source.replace(f"from {_PACKAGE}.", "from ")


def release(bank: Bank, evaluation: Evaluation, out: Path, notice: str) -> GateResult:
    """Writes the folder `out`, which must not exist. Raises UsageError when the gate does not pass; nothing is left then."""
    recall = evaluation.recall
    check_recall(recall["bf16"]["test"]["mean"]["8"], recall["int8"]["test"]["mean"]["8"])
    if out.exists():
        raise UsageError(f"{out} exists: name a new folder for the bank")
    partial = out.with_name(f".{out.name}.{secrets.token_hex(4)}.partial")
    try:
        partial.mkdir(parents=True)
        gate = _write(bank, evaluation, partial, notice)
        partial.rename(out)
    except OSError as error:
        raise UsageError(f"{out} can not be written: {reason(error)}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return gate


def _write(bank: Bank, evaluation: Evaluation, folder: Path, notice: str) -> GateResult:
    coded = to_int8(bank)
    (folder / MODEL).write_bytes(save({name: tensor.contiguous() for name, tensor in bank.tensors.items()}))
    texts: dict[str, str] = {CONFIG: bank.config.model_dump_json(by_alias=True, indent=1) + "\n"}
    texts |= {name: released_source(name) for name in PYTHON_FILES}
    texts["LICENSE"] = (package_files("huorn.predictor.release") / "LICENSE").read_text(encoding="utf-8")
    texts["NOTICE"] = _notice(bank, notice)
    plotted = draw_recall(evaluation, folder / "recall.png")
    texts["README.md"] = card_text(bank, evaluation, coded, notice, plotted)
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    (folder / FIXTURE).write_bytes(save(make_fixture(bank)))
    compare_with_source(folder, bank)
    _, gate = check_bank(folder, {name: sha256_tensor(tensor) for name, tensor in coded.items()})
    if not gate.same_scores:
        raise UsageError(
            "the scorer does not give the same bits twice on this machine: the bank is not released"
        )
    hashes = {path.name: sha256_file(path) for path in folder.iterdir()}
    more: Mapping[str, object] = {
        "environment": {"torch": torch.__version__, "python": platform.python_version(), "cpu": cpu_model()},
        "gate": {
            "tensors_equal": gate.tensors, "int8_buffers_equal": gate.int8_buffers, "fixture_sets": gate.sets,
            "largest_int8_score_difference": gate.int8_score_difference, "native_bound_used": gate.native_bound_used,
        },
        "sources": bank.config.provenance.model_dump(include={"traces", "run"}),
    }  # fmt: skip
    (folder / MANIFEST).write_text(manifest_text(hashes, coded, more), encoding="utf-8")
    return gate


def _notice(bank: Bank, notice: str) -> str:
    base = bank.config.base_model
    return (
        f"Expert-predictor bank for {base.repo}\nMade with huorn {bank.config.provenance.huorn}.\n\nThe weights were "
        "fitted to the "
        f"routing decisions of {base.repo}, revision {base.revision}; terms of that model may apply to it.\n\n{notice}\n"
    )
