"""Imported traces against the CSV that they come from, read line by line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from huorn.errors import TraceError, UsageError
from huorn.trace.import_csv import import_route_csv
from huorn.trace.recording import Traces

from .recordings import files_of
from .traces import csv_of, recorded_file


def imported(csv: Path, out: Path) -> Traces:
    import_route_csv(csv, out, lambda done, total: None)
    traces = Traces.open(out)
    traces.verify()
    return traces


def decode_rows(csv: Path) -> dict[tuple[int, int, int], tuple[list[int], list[float]]]:
    """(turn, step, layer) -> experts and weights by rank."""
    found: dict[tuple[int, int, int], tuple[list[int], list[float]]] = {}
    for line in csv.read_text().splitlines():
        if line[0].isdigit():
            turn, phase, step, layer, _, expert, weight, *_ = line.split(",")
            if phase == "1":
                ids, weights = found.setdefault((int(turn), int(step), int(layer)), ([], []))
                ids.append(int(expert))
                weights.append(float(weight))
    return found


@pytest.mark.parametrize(("name", "splits"), [("qwen", (102, 13, 13)), ("gptoss", (51, 7, 6))])
def test_recorded_traces(name: str, splits: tuple[int, int, int], tmp_path: Path) -> None:
    csv = recorded_file(name)
    traces, wanted = imported(csv, tmp_path / "t"), decode_rows(csv)
    found = [prompt for split in ("train", "validation", "test") for prompt in traces.split(split)]
    assert [prompt.count for prompt in found] == list(splits)
    assert (traces.manifest.split_by, traces.manifest.captured) == ("time", ("ids", "weights"))
    steps = sorted({(turn, step) for turn, step, _ in wanted})
    assert len(steps) == sum(splits)
    for layer in range(traces.manifest.model.layers):
        records = np.concatenate([np.array(chunk.layer(layer)) for chunk in traces.chunks])
        assert records.dtype.names == ("ids", "weights")
        for (turn, step), record in zip(steps, records, strict=True):
            ids, weights = wanted[turn, step, layer]
            assert record["ids"].tolist() == ids
            assert record["weights"].tolist() == np.array(weights, dtype=np.float32).tolist()
    again = files_of(tmp_path / "t")
    imported(csv, tmp_path / "t")
    assert files_of(tmp_path / "t") == again


def rows_of(steps: list[tuple[int, int]]) -> str:
    """A CSV of decode steps (turn, step), each after two tokens of prompt in its turn."""
    rows = [
        (turn, 0, token, layer, rank, rank)
        for turn in {t for t, _ in steps}
        for token in (0, 1)
        for layer in (0, 1)
        for rank in (0, 1)
    ]
    rows += [
        (turn, 1, step, layer, rank, (step + layer + 3 * rank) % 8)
        for turn, step in steps
        for layer in (0, 1)
        for rank in (0, 1)
    ]
    return csv_of(rows)


def test_turns_gaps_and_splits_end_a_prompt(tmp_path: Path) -> None:
    steps = [(0, 2), (0, 3), (0, 4), (0, 7), (0, 8), (1, 2), (1, 3), (1, 4), (1, 5), (1, 6)]
    (tmp_path / "x.csv").write_text(rows_of(steps))
    traces = imported(tmp_path / "x.csv", tmp_path / "t")
    prompts = traces.manifest.prompts
    assert [prompt.rows for prompt in prompts] == [3, 2, 3, 1, 1]
    assert [prompt.split for prompt in prompts] == ["train", "train", "train", "validation", "test"]
    assert [prompt.group for prompt in prompts] == [0, 0, 1, 1, 1]
    assert {prompt.prompt_tokens for prompt in prompts} == {2}
    (chunk,) = traces.chunks
    assert chunk.rows["step"].tolist() == [0, 1, 2, 0, 1, 0, 1, 2, 0, 0]
    for field in ("position", "id", "next_id"):
        assert (chunk.rows[field] == -1).all()
    assert chunk.layer(1)["ids"].tolist() == [[(step + 1) % 8, (step + 4) % 8] for _, step in steps]


def test_too_few_steps(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text(rows_of([(0, 2), (0, 3)]))
    with pytest.raises(UsageError, match="2 decode steps are too few"):
        import_route_csv(tmp_path / "x.csv", tmp_path / "t", lambda done, total: None)
    assert not (tmp_path / "t").exists()


def test_a_layer_that_is_not_there(tmp_path: Path) -> None:
    rows = [(0, 1, step, 1, rank, rank) for step in range(4) for rank in (0, 1)]
    (tmp_path / "x.csv").write_text(csv_of(rows))
    with pytest.raises(TraceError, match="says nothing of layer 0 in decode"):
        import_route_csv(tmp_path / "x.csv", tmp_path / "t", lambda done, total: None)
