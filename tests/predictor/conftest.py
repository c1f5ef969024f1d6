"""A trained run and its released bank, made once."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

from huorn.predictor.bank import bank_from_run
from huorn.predictor.bank_files.reference_scorer import Bank
from huorn.predictor.evaluate import Evaluation, evaluate
from huorn.predictor.release.export import release
from huorn.predictor.run_folder import TrainSettings
from huorn.predictor.train import make_spec, train
from huorn.trace.recording import Traces
from tests.predictor.made_traces import make, splits_of, write


class Released(NamedTuple):
    traces: Path
    run: Path
    bank: Bank
    evaluation: Evaluation
    folder: Path


@pytest.fixture(scope="session")
def released(tmp_path_factory: pytest.TempPathFactory) -> Released:
    """Heads for layers 0, 3 and 6 of the made-up model. Do not change the folders."""
    at = tmp_path_factory.mktemp("bank")
    folder = write(make([60] * 16, splits_of(12, 2, 2)), at / "traces")
    traces = Traces.open(folder)
    spec = make_spec(traces, "card", TrainSettings(trunk=128, epochs=4, batch=64, learning_rate=1e-2))
    train(traces, spec, [0, 3, 6], at / "run", 1, None, lambda *_: None)
    bank, full = bank_from_run(at / "run")
    found = evaluate(bank, full, traces, lambda *_: None)
    release(bank, found, at / "bank", "Made-up numbers.")
    return Released(folder, at / "run", bank, found, at / "bank")
