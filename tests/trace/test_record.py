"""Recording with the embedded model: what is recorded is what the layers did, and both modes give the same bits."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch

from huorn.assets import EMBEDDED_MODEL
from huorn.checkpoint.reader import Checkpoint
from huorn.engine.fast_tier import Residency
from huorn.engine.session import Session
from huorn.errors import TraceError, UsageError
from huorn.model.cpu_decoder import CpuDecoder
from huorn.model.precision import Precision
from huorn.model.state import DecodeState
from huorn.schedule.shapes import PREFILL_CHUNK
from huorn.trace.folder import open_folder
from huorn.trace.plan_recording import Request, plan_recording
from huorn.trace.prompts import RecordMode
from huorn.trace.record import record
from huorn.trace.recording import PromptRows, Traces

CONTEXT = 1024
PROMPTS = (
    {"prompt": "def quicksort(items):\n    if not items:\n        return items\n"},
    {"prompt": "import os\nimport sys\n\n\ndef main():\n"},
    {"messages": [{"role": "user", "content": "How do I sort a list in Python?"}]},
    {"prompt": "#include <stdio.h>\n\nint main(void) {\n"},
)


def nothing(done: int, total: int) -> None:
    pass


def open_session(slots: float | None = None) -> Session:
    return Session.open(EMBEDDED_MODEL, CONTEXT, 1, residency=Residency(None, slots))


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    with closing(open_session()) as opened:
        yield opened


def record_lines(
    session: Session, folder: Path, lines: object, mode: RecordMode, tokens: int, chunk_rows: int = 50
) -> Traces:
    """`lines` are dumped beside `folder`."""
    file = folder.with_suffix(".jsonl")
    file.write_text("\n".join(map(json.dumps, lines)))
    plan = plan_recording(
        Request(file, mode, tokens, chunk_rows), EMBEDDED_MODEL, CONTEXT, Precision.BF16, nothing
    )
    with open_folder(folder, plan.manifest) as opened:
        record(session, opened, plan, nothing)
    traces = Traces.open(folder)
    traces.verify()
    return traces


def prompt_rows(traces: Traces) -> dict[int, PromptRows]:
    return {each.prompt: each for split in ("train", "validation", "test") for each in traces.split(split)}


def assert_same_rows(one: Traces, other: Traces) -> None:
    ours, theirs = prompt_rows(one), prompt_rows(other)
    assert ours.keys() == theirs.keys()
    for prompt, first in ours.items():
        second = theirs[prompt]
        here, there = (slice(each.first, each.first + each.count) for each in (first, second))
        assert first.chunk.rows[here].tobytes() == second.chunk.rows[there].tobytes()
        for layer in range(one.manifest.model.layers):
            records, others = first.chunk.layer(layer)[here], second.chunk.layer(layer)[there]
            for field in ("hidden", "logits", "ids", "weights"):
                assert (records[field] == others[field]).all(), (prompt, layer, field)
            assert records.tobytes() == others.tobytes()


@pytest.fixture(scope="module")
def decoded(session: Session, tmp_path_factory: pytest.TempPathFactory) -> Traces:
    return record_lines(session, tmp_path_factory.mktemp("decode") / "t", PROMPTS, "decode", 40)


def as_ids(traces: Traces) -> list[dict[str, object]]:
    """The prompts and what the model wrote, as lines for teacher."""
    plan = plan_recording(
        Request(traces.folder.with_suffix(".jsonl"), "decode", 40), EMBEDDED_MODEL, CONTEXT, Precision.BF16, nothing
    )  # fmt: skip
    lines = []
    for prompt, found in sorted(prompt_rows(traces).items()):
        rows = found.chunk.rows[found.first : found.first + found.count]
        ids = [*plan.prompts[prompt].ids.tolist(), *rows["id"].tolist(), int(rows["next_id"][-1])]
        lines.append({"ids": ids, "prompt_tokens": len(plan.prompts[prompt].ids)})
    return lines


def test_rows_follow_each_other(decoded: Traces) -> None:
    for found in prompt_rows(decoded).values():
        rows = found.chunk.rows[found.first : found.first + found.count]
        tokens = decoded.manifest.prompts[found.prompt].prompt_tokens
        assert rows["step"].tolist() == list(range(found.count))
        assert rows["position"].tolist() == list(range(tokens, tokens + found.count))
        assert rows["id"].tolist()[1:] == rows["next_id"].tolist()[:-1]
        assert found.count == 39 or rows["next_id"][-1] in open_stop_ids()


def open_stop_ids() -> set[int]:
    config = json.loads((EMBEDDED_MODEL / "generation_config.json").read_text())
    ids = config["eos_token_id"]
    return set(ids if isinstance(ids, list) else [ids])


def test_the_text_is_that_of_the_decoder_without_a_recorder(session: Session, decoded: Traces) -> None:
    for line in as_ids(decoded):
        ids, start = torch.tensor(line["ids"]), int(str(line["prompt_tokens"]))
        state = DecodeState.new(session.config, CONTEXT, Precision.BF16)
        logits = session.decoder.forward(ids[:start], state)
        for token in ids[start:]:
            assert int(logits.argmax()) == int(token)
            logits = session.decoder.forward(token.view(1), state)


@pytest.mark.parametrize("piece", [PREFILL_CHUNK, 1, 3, 7])
def test_teacher_gives_the_rows_of_decode(
    session: Session, decoded: Traces, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    monkeypatch.setattr("huorn.trace.record.PREFILL_CHUNK", piece)
    assert_same_rows(decoded, record_lines(session, tmp_path / "t", as_ids(decoded), "teacher", 40))


def test_slots_give_the_same_rows(decoded: Traces, tmp_path: Path) -> None:
    with closing(open_session(slots=80)) as slots:
        assert slots.cache is not None
        assert_same_rows(decoded, record_lines(slots, tmp_path / "d", PROMPTS, "decode", 40))
        assert_same_rows(decoded, record_lines(slots, tmp_path / "t", as_ids(decoded), "teacher", 40))


def test_hidden_states_are_what_the_router_read(decoded: Traces) -> None:
    """The router's weights times what was recorded, in float64, and the experts that follow from the logits."""
    checkpoint = Checkpoint.open(EMBEDDED_MODEL)
    for layer in range(decoded.manifest.model.layers):
        router = checkpoint.tensor(f"layers.{layer}.mlp.gate.weight").double().numpy()
        for chunk in decoded.chunks:
            records = chunk.layer(layer)
            operands = torch.from_numpy(records["hidden"].astype(np.float32)).bfloat16().double().numpy()
            logits = operands @ router.T
            assert np.abs(logits - records["logits"]).max() < 0.003 * np.abs(logits).max()
            chosen = np.take_along_axis(records["logits"].astype(np.float64), records["ids"].astype(int), 1)
            assert (chosen[:, -1] >= np.sort(records["logits"], axis=1)[:, -8]).all()
            weights = np.exp(chosen) / np.exp(chosen).sum(axis=1, keepdims=True)
            assert np.abs(weights - records["weights"]).max() < 2e-3


def test_a_decoder_with_a_tap_gives_the_same_bits(session: Session) -> None:
    class Tap:
        def __init__(self) -> None:
            self.seen: list[tuple[int, tuple[int, ...]]] = []

        def layer(
            self, number: int, hidden: np.ndarray, logits: np.ndarray, ids: np.ndarray, weights: np.ndarray
        ) -> None:
            self.seen.append((number, (*hidden.shape, *logits.shape, *ids.shape, *weights.shape)))

    decoder = session.decoder
    assert isinstance(decoder, CpuDecoder)
    ids = torch.arange(40, 60)
    found, taps = [], [None, Tap()]
    for tap in taps:
        state = DecodeState.new(session.config, 64, Precision.BF16)
        decoder.tap = tap
        try:
            found.append([decoder.forward(part, state, True) for part in ids.split([1, 3, 2, 14])])
        finally:
            decoder.tap = None
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    seen = taps[1].seen
    assert [number for number, _ in seen] == list(range(8)) * 4
    assert [shape for _, shape in seen[::8]] == [(n, 256, n, 64, n, 8, n, 8) for n in (1, 3, 2, 14)]


def test_a_chunk_ends_behind_the_prompt_that_fills_it(decoded: Traces) -> None:
    counts = [prompt.rows for prompt in decoded.manifest.prompts]
    assert [chunk.count for chunk in decoded.chunks] == [counts[0] + counts[1], counts[2] + counts[3]]


def test_text_alone_is_recorded_from_its_first_token(session: Session, tmp_path: Path) -> None:
    lines = [{"text": text} for text in ("alpha beta gamma delta", "x = 1\ny = 2\n", "x", "eins zwei drei")]
    traces = record_lines(session, tmp_path / "t", lines, "teacher", 4)
    found = prompt_rows(traces)
    assert found[0].chunk.rows[found[0].first]["position"] == 0
    assert [prompt.rows for prompt in traces.manifest.prompts] == [
        3,
        3,
        0,
        3,
    ]  # at most 4 tokens; one has no next
    assert [prompt.prompt_tokens for prompt in traces.manifest.prompts] == [0] * 4


def test_an_answer_that_goes_on_with_the_one_before_is_read_anew(session: Session, tmp_path: Path) -> None:
    """The state has read all of it but the end, and of what it does not read again nothing would be recorded."""
    ids = [7, 300, 41, 9, 1200, 33, 812, 5, 77, 2050]
    lines = [{"ids": ids[:end], "prompt_tokens": start} for start, end in ((3, 7), (3, 10), (5, 10), (0, 10))]
    lines += [{"ids": [1, 2, 3]}, {"ids": [900, 901, 902, 903, 904, 905, 906]}]
    traces = record_lines(session, tmp_path / "t", lines, "teacher", 40)
    found = prompt_rows(traces)
    whole = found[3].chunk.layer(4)[found[3].first : found[3].first + 9]
    for prompt, (start, end) in enumerate(((3, 7), (3, 10), (5, 10))):
        rows = found[prompt]
        records = rows.chunk.layer(4)[rows.first : rows.first + rows.count]
        assert records.tobytes() == whole[start : end - 1].tobytes()


def test_a_value_beyond_f16_names_layer_and_line(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huorn.trace.record import _Tap

    plain = _Tap.layer

    def huge(self: _Tap, number: int, hidden: np.ndarray, *others: np.ndarray) -> None:
        if number == 5 and self.writer.rows > 60:
            hidden = hidden.copy()
            hidden[0, 3] = 1e5
        plain(self, number, hidden, *others)

    monkeypatch.setattr(_Tap, "layer", huge)
    with pytest.raises(
        TraceError, match=r"^t.jsonl, line \d: layer 5 has a hidden state of 100000, and a trace holds"
    ):
        record_lines(session, tmp_path / "t", PROMPTS, "decode", 40, chunk_rows=1000)
    assert not list((tmp_path / "t").glob("*chunk*"))
    assert session.decoder.tap is None


def test_the_reference_backend_is_refused(tmp_path: Path) -> None:
    reference = Session.open(EMBEDDED_MODEL, 64, 1, backend="reference")
    with pytest.raises(UsageError, match="recorded with the native kernels"):
        record_lines(reference, tmp_path / "t", PROMPTS, "decode", 4)
    assert not (tmp_path / "t").exists()
