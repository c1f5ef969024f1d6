"""The reader of recorded routing: what it makes of a file, and how it refuses a damaged one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from huorn.errors import TraceError
from huorn.trace.route_csv import COLUMNS, RouteTrace, read_route_csv

from .traces import csv_of, recorded, recorded_file

ROWS = [  # turn, phase, step, layer, rank, expert
    (0, 0, 0, 0, 0, 5), (0, 0, 0, 0, 1, 3), (0, 0, 1, 0, 0, 2), (0, 0, 1, 0, 1, 5),
    (0, 0, 1, 1, 0, 7), (0, 0, 1, 1, 1, 0),  # the last layer runs for the last token alone
    (0, 1, 2, 0, 1, 1), (0, 1, 2, 0, 0, 4), (0, 1, 2, 1, 0, 6), (0, 1, 2, 1, 1, 1),
    (1, 0, 0, 0, 0, 3), (1, 0, 0, 0, 1, 2), (1, 0, 0, 1, 0, 1), (1, 0, 0, 1, 1, 0),
]  # fmt: skip


def written(folder: Path, text: str) -> Path:
    path = folder / "x.route.csv"
    path.write_text(text)
    return path


def test_calls_come_in_the_order_in_which_layers_ran(tmp_path: Path) -> None:
    trace = read_route_csv(written(tmp_path, csv_of(ROWS)))
    assert (trace.model, trace.layers, trace.experts, trace.top_k) == ("/a b/m.gguf", 2, 8, 2)
    assert trace.expert_bytes == (100, 80)
    assert trace.all_bytes == 8 * 180
    assert [(call.layer, call.ids.tolist(), call.decode) for call in trace.calls] == [
        (0, [[5, 3], [2, 5]], False),
        (1, [[7, 0]], False),
        (0, [[4, 1]], True),
        (1, [[6, 1]], True),
        (0, [[3, 2]], False),
        (1, [[1, 0]], False),
    ]
    assert {str(call.ids.dtype) for call in trace.calls} == {"int32"}
    shuffled = read_route_csv(written(tmp_path, csv_of(ROWS[::-1])))
    assert [call.ids.tolist() for call in shuffled.calls] == [call.ids.tolist() for call in trace.calls]


def replaced(old: str, new: str) -> Callable[[str], str]:
    def change(text: str) -> str:
        assert old in text
        return text.replace(old, new, 1)

    return change


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda text: "", "is not a route trace: its first line is not '# route_trace v1'"),
        (replaced("v1", "v2"), "is not a route trace"),
        (replaced("weight", "w"), "line 5 does not name the columns"),
        (lambda text: text[: text.index(COLUMNS)], "line 5 does not name the columns"),
        (replaced("n_expert=8", "n_expert=x"), "has 0 header lines with model"),
        (replaced("n_expert_used=2", "n_expert_used=9"), "its header claims 2 layers, 9 of 8 experts"),
        (replaced("n_layer=2", "n_layer=0"), "its header claims 0 layers"),
        (replaced("# layer=1 expert_bytes=80\n", ""), "does not say how large an expert of layer 1 is"),
        (replaced("expert_bytes=80", "expert_bytes=0"), "does not say how large an expert of layer 1 is"),
        (replaced("0,0,0,0,0,5", "0,0,0,0,0,x"), "line 6 is no row of turn,phase"),
        (replaced("0,0,0,0,0,5,0.5", "0,0,0,0,0,5"), "line 6 is no row of"),
        (lambda text: text[:-6], "line 19 is no row of"),
        (replaced("0,0,0,0,0,5", "0,0,0,0,0,8"), "line 6 leaves the 2 layers, 2 ranks and 8 experts"),
        (replaced("0,0,0,0,0,5", "0,0,0,0,-1,5"), "line 6 leaves"),
        (replaced("0,0,0,0,0,5", "0,0,0,2,0,5"), "line 6 leaves"),
        (replaced("0,0,0,0,0,5", "0,2,0,0,0,5"), "line 6 leaves .* or the phases 0 and 1"),
        (replaced("0,0,0,0,1,3", "0,0,0,0,0,3"), "line 7 repeats a rank or an expert"),
        (replaced("0,0,0,0,1,3", "0,0,0,0,1,5"), "line 7 repeats a rank or an expert"),
        (replaced("0,1,2,1,1,1,0.5,0,100\n", ""), "turn 0, decode step 2, layer 1 has no expert of rank 1"),
        (lambda text: text[: text.index(COLUMNS) + len(COLUMNS)], "records no token"),
    ],
)
def test_damaged_files(tmp_path: Path, change: Callable[[str], str], says: str) -> None:
    path = written(tmp_path, change(csv_of(ROWS)))
    with pytest.raises(TraceError, match=rf"^{path}:? .*{says}"):
        read_route_csv(path)


def test_a_trace_that_was_cut_short(tmp_path: Path) -> None:
    steps = [(0, 1, step, layer, rank, rank) for step in (3, 4) for layer in (0, 1) for rank in (0, 1)]
    path = written(tmp_path, csv_of(steps[:-2]))
    with pytest.raises(TraceError, match=r"turn 0, decode step 4 lacks layer 1; the trace was cut short$"):
        read_route_csv(path)


def test_files_that_can_not_be_read(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"none can not be read as a route trace: No such file"):
        read_route_csv(tmp_path / "none")
    with pytest.raises(TraceError, match=r"can not be read as a route trace: Is a directory"):
        read_route_csv(tmp_path)
    (tmp_path / "binary").write_bytes(b"# route\xff")
    with pytest.raises(TraceError, match=r"binary can not be read as a route trace: .*0xff"):
        read_route_csv(tmp_path / "binary")


def outcome(path: Path) -> RouteTrace | str:
    try:
        return read_route_csv(path)
    except TraceError as error:
        return str(error)


@settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_damage_is_one_sentence_or_another_trace(tmp_path: Path, data: st.DataObject) -> None:
    raw = bytearray(csv_of(ROWS), "ascii")
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(raw)))
        cut = data.draw(st.integers(0, 8))
        raw[start : start + cut] = data.draw(
            st.binary(max_size=8) | st.sampled_from([b"1", b",", b"\n", b"-9"])
        )
    path = tmp_path / "damaged.csv"
    path.write_bytes(raw)
    trace = outcome(path)
    if isinstance(trace, str):
        assert str(path) in trace
        assert "\n" not in trace
        return
    for call in trace.calls:
        assert 0 <= call.layer < trace.layers
        assert call.ids.shape[1] == trace.top_k
        assert call.ids.min() >= 0
        assert call.ids.max() < trace.experts
        assert all(len(set(token)) == trace.top_k for token in call.ids.tolist())


@pytest.mark.parametrize(
    ("name", "shape", "prompt", "decoded", "rows"),
    [("qwen", (48, 128, 6), 28, 128, 44_766), ("gptoss", (36, 128, 2), 85, 64, 10_560)],
)
def test_recorded_traces(
    name: str, shape: tuple[int, int, int], prompt: int, decoded: int, rows: int
) -> None:
    trace = recorded(name)
    layers, _, top_k = shape
    assert (trace.layers, trace.experts, trace.top_k) == shape
    prefill = [call for call in trace.calls if not call.decode]
    assert [call.layer for call in prefill] == list(range(layers))
    assert [len(call.ids) for call in prefill] == [prompt] * (layers - 1) + [1]
    decode = [call for call in trace.calls if call.decode]
    assert [call.layer for call in decode] == list(range(layers)) * decoded
    assert {call.ids.shape for call in decode} == {(1, top_k)}
    assert sum(call.ids.size for call in trace.calls) == rows
    assert trace.all_bytes == 128 * {"qwen": 24 * 3_059_712 + 24 * 2_654_208, "gptoss": 36 * 13_219_200}[name]
    lines = recorded_file(name).read_text().splitlines()
    assert rows == sum(line[0] in "0123456789" for line in lines)
