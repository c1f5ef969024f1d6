"""Forecasts in the decode loop: made from what recording and the reference would see, dropped where they do not follow."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from huorn.assets import EMBEDDED_BANK, EMBEDDED_MODEL
from huorn.checkpoint.reader import Checkpoint
from huorn.engine.fast_tier import Residency
from huorn.engine.forecasting import OFF, Forecasting
from huorn.engine.session import Session
from huorn.errors import UsageError
from huorn.model.precision import Precision
from huorn.predictor.bank_files.bank_loader import to_int8
from huorn.predictor.bank_files.int8_bank import score_head
from huorn.predictor.bank_files.reference_scorer import Rows, assemble, base_hidden, update_prior
from huorn.predictor.released import open_bank
from huorn.predictor.served_bank import ServedBank
from huorn.trace.folder import open_folder
from huorn.trace.manifest import SPLITS
from huorn.trace.plan_recording import Request, plan_recording
from huorn.trace.record import record
from huorn.trace.recording import Traces

PROMPT, STEPS = [5, 9, 2, 40, 33, 7, 300, 12], 24
"""The start of a text, and decode steps behind it."""


@pytest.fixture(scope="module")
def session() -> Session:
    return Session.open(None, 512, residency=Residency(slots=0.25, forecasting=Forecasting(fixed=24)))


def decoded(session: Session, forecasts: bool = True) -> tuple[list[int], list[np.ndarray | None]]:
    """Greedy ids behind PROMPT, and the forecast that was made before each of them was read."""
    state, ids, made = session.new_state(), list(PROMPT), list[np.ndarray | None]()
    token = state.read(PROMPT)
    for _ in range(STEPS):
        ids.append(int(token.full().argmax()))
        token = state.decode(ids[-1])
        said = session.forecaster.forecast if session.forecaster is not None and forecasts else None
        made.append(None if said is None else said.copy())
    return ids[len(PROMPT) :], made


@pytest.fixture(scope="module")
def recorded(session: Session, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[int], Traces]:
    """The same tokens, read as a given text by the recorder."""
    at = tmp_path_factory.mktemp("forecaster")
    ids, _ = decoded(session)
    line = {"ids": [*PROMPT, *ids], "prompt_tokens": len(PROMPT)}
    others = [{"ids": [n + k * k for k in range(20)]} for n in (1000, 2000, 3000)]
    (at / "p.jsonl").write_text("".join(json.dumps(one) + "\n" for one in (line, *others)))
    reading = Session.open(None, 512)
    request = Request(at / "p.jsonl", "teacher", STEPS, 4096)
    plan = plan_recording(request, EMBEDDED_MODEL, 512, Precision.BF16, lambda *_: None)
    with open_folder(at / "t", plan.manifest) as folder:
        record(reading, folder, plan, lambda *_: None)
    return ids, Traces.open(at / "t")


def test_forecasts_are_those_of_the_reference_on_recorded_rows(
    session: Session, recorded: tuple[list[int], Traces]
) -> None:
    ids, traces = recorded
    _, made = decoded(session)
    assert made[0] is None  # the first step has nothing to go by
    bank = open_bank(EMBEDDED_BANK)
    coded, heads = to_int8(bank), bank.config.heads.layers
    every = [prompt for split in SPLITS for prompt in traces.split(split)]
    prompt = next(one for one in every if one.prompt == 0)
    rows = prompt.chunk.rows[prompt.first : prompt.first + prompt.count]
    assert rows["id"].tolist() == ids[:-1]
    layers = [prompt.chunk.layer(layer) for layer in range(8)]

    def field(name: str, row: int) -> torch.Tensor:
        return torch.from_numpy(np.stack([layer[name][prompt.first + row] for layer in layers]))

    prior = torch.zeros(8, 64)
    for row in range(prompt.count):
        routed = field("ids", row)
        prior = update_prior(prior, routed, bank.config.features.ema_beta)
        previous = field("ids", row - 1) if row else torch.full_like(routed, -1)
        seen = Rows(
            layers=range(8), hidden_layers=range(8), hidden=field("hidden", row)[None], router_logits=field("logits", row)[None],
            routed=routed[None], previous=previous[None], prior=prior[None], step=torch.tensor([row]),
            token=torch.tensor([ids[row]]), next_token=torch.tensor([ids[row + 1]]),
        )  # fmt: skip
        x = assemble(bank.config.features, heads, seen, bank.tensors["token_table"])[0]
        base, mine = base_hidden(heads, seen)[0], made[row + 1]
        assert mine is not None
        for number, layer in enumerate(heads):
            _, theirs = score_head(coded, number, x[number], base[number])
            # Sums in another order: a BF16 rounding or two apart.
            torch.testing.assert_close(torch.from_numpy(mine[layer]), theirs, rtol=0.05, atol=0.02)
            assert np.corrcoef(mine[layer][0], theirs[0].numpy())[0, 1] > 0.9999


def test_a_forecast_follows_its_own_sequence_only(session: Session) -> None:
    forecaster = session.forecaster
    assert forecaster is not None
    one, other = session.new_state(), session.new_state()
    one.read(PROMPT)
    other.read(PROMPT[::-1])
    one.decode(7)
    assert forecaster.forecast is None
    one.decode(8)
    assert forecaster.forecast is not None
    other.decode(9)
    assert forecaster.forecast is None
    one.decode(9)  # the last forward was the other's
    assert forecaster.forecast is None
    one.decode(10)
    assert forecaster.forecast is not None
    one.read([11, 12])
    one.decode(13)
    assert forecaster.forecast is None
    one.decode(14)
    one.rewind(PROMPT)
    one.read(PROMPT)
    one.decode(7)
    assert forecaster.forecast is None


def test_the_same_tokens_after_the_same_prompt_give_the_same_forecasts(session: Session) -> None:
    """Nothing of an earlier request is left in them."""
    (ids, first), (again, second) = decoded(session), decoded(session)
    assert ids == again
    for a, b in zip(first, second, strict=True):
        assert (a is None and b is None) or np.array_equal(a, b, equal_nan=True)  # type: ignore[arg-type]


def test_an_id_without_a_row_has_no_forecast(session: Session) -> None:
    forecaster = session.forecaster
    assert forecaster is not None
    table = forecaster._rows._table
    state = session.new_state()
    state.read(PROMPT)
    state.decode(7)
    try:
        table.shape = (8, table.shape[1])
        forecaster._rows._rows.clear()
        state.decode(9)
        assert forecaster.forecast is None
    finally:
        table.shape = (4096, table.shape[1])


def test_a_bank_that_can_not_be_read_any_more_ends_forecasts_and_no_request(copied: Path) -> None:
    session = Session.open(None, 512, residency=Residency(slots=0.25, forecasting=Forecasting(str(copied))))
    whole = decoded(
        Session.open(None, 512, residency=Residency(slots=0.25, forecasting=Forecasting(OFF))), False
    )
    os.truncate(copied / "model.safetensors", 4096)
    assert decoded(session, False) == whole
    assert session.forecaster is not None
    [line] = session.forecaster.control.log
    assert "the bank can not be read" in line
    assert line.endswith("no more forecasts")


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """The embedded bank, to be damaged."""
    folder = tmp_path / "bank"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_bytes((EMBEDDED_BANK / name).read_bytes())
    return folder


def test_a_bank_of_another_model_is_named(copied: Path) -> None:
    text = (copied / "config.json").read_text()
    config = json.loads(text)
    config["base_model"]["fingerprint"] = "ab" * 32
    (copied / "config.json").write_text(json.dumps(config))
    checkpoint = Checkpoint.open(EMBEDDED_MODEL)
    with pytest.raises(UsageError, match=rf"{copied} can not serve this model: .*{'ab' * 32}"):
        ServedBank.open(copied, checkpoint)
    (copied / "config.json").write_text(text.replace('"trunk": 256', '"trunk": 128'))
    with pytest.raises(UsageError, match=r"can not be used: .* but config\.json says"):
        ServedBank.open(copied, checkpoint)
    longer = json.loads(text)
    longer["heads"]["horizons"] = [1, 4, 17]
    (copied / "config.json").write_text(json.dumps(longer))
    with pytest.raises(UsageError, match=r"forecasts \[1, 4, 17\] tokens ahead"):
        ServedBank.open(copied, checkpoint)
    (copied / "config.json").write_text("{")
    with pytest.raises(UsageError, match="is damaged or of another kind"):
        ServedBank.open(copied, checkpoint)


def test_which_bank_is_meant(tmp_path: Path) -> None:
    model = tmp_path / "m"
    model.mkdir()
    assert Forecasting().bank_of(model) is None
    beside = tmp_path / "m_bank"
    beside.mkdir()
    (beside / "config.json").touch()
    assert Forecasting().bank_of(model) == beside
    assert Forecasting(OFF).bank_of(model) is None
    assert Forecasting(str(tmp_path)).bank_of(model) == tmp_path
    (model / "bank").mkdir()
    (model / "bank" / "config.json").touch()
    assert Forecasting().bank_of(model) == model / "bank"
    assert Forecasting().bank_of(EMBEDDED_MODEL) == EMBEDDED_BANK.resolve()
