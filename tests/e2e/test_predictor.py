"""huorn predictor from the command line, on traces of the embedded model; mistakes in one sentence."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest

from tests.predictor.made_traces import make, splits_of, write

from .command_line import Caller, assert_one_sentence, huorn


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real recording of 24 short texts."""
    at = tmp_path_factory.mktemp("traces")
    words = [
        "def",
        "class",
        "return",
        "for",
        "if",
        "import",
        "while",
        "in",
        "self",
        "None",
        "True",
        "print",
        "list",
        "dict",
        "open",
        "read",
    ]
    rng = random.Random(0)
    texts = [" ".join(rng.choices(words, k=80)) for _ in range(24)]
    (at / "p.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    done = huorn(
        "trace",
        "record",
        "--mode",
        "teacher",
        "--prompts",
        at / "p.jsonl",
        "--out",
        at / "t",
        "--tokens",
        "64",
    )
    assert done.code == 0, done.stderr
    return at / "t"


@pytest.fixture(scope="module")
def run(traces: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("run") / "r"
    done = huorn(
        "predictor",
        "train",
        "--traces",
        traces,
        "--layers",
        "2,6-7",
        "--out",
        out,
        "--trunk",
        "128",
        "--epochs",
        "2",
        "--batch",
        "128",
    )
    assert done.code == 0, done.stderr
    assert "3 heads trained" in done.stdout
    return out


def test_train_evaluate_release_verify(traces: Path, run: Path, tmp_path: Path, call: Caller) -> None:
    assert sorted(path.name for path in run.iterdir()) == [
        "curves.png", "head-02", "head-06", "head-07", "run.json", "token_table.safetensors", "traces.json",
    ]  # fmt: skip
    done = call(
        "predictor", "release", run, "--out", tmp_path / "bank", "--repo", "made/seedling", "--revision", "r1"
    )
    assert done.code == 0, done.stderr
    assert "9 input sets score alike" in done.stdout
    done = call("predictor", "verify", tmp_path / "bank")
    assert done.code == 0, done.stderr
    assert "all 12 files are as released; 3 heads for made/seedling" in done.stdout
    card = (tmp_path / "bank" / "README.md").read_text()
    assert "revision r1" in card
    found = []
    for source in (run, tmp_path / "bank"):
        done = call("predictor", "evaluate", source, "--traces", traces, "--json", tmp_path / "e.json")
        assert done.code == 0, done.stderr
        assert "the best forecast of equal lead" in done.stdout
        found.append(json.loads((tmp_path / "e.json").read_text()))
    recall = found[0]["recall"]["huorn"]
    assert recall.keys() == {"f32", "bf16", "int8"}
    for precision in recall.values():
        assert precision.keys() == {"validation", "test"}
        for split in precision.values():
            assert split.keys() == {"2", "6", "7", "mean"}
            assert all(
                list(row) == ["8", "12", "16", "24", "32", "48", "64"] and row["64"] == 1
                for row in split.values()
            )
    assert {"repeat", "ema", "popularity", "count_table", "next_layer_gate"} == found[0]["baselines"].keys()
    assert found[0]["baselines"]["ema"]["test"].keys() == {"2", "6", "7", "mean"}
    # What was released forecasts as what was trained.
    for precision in ("bf16", "int8"):
        assert found[1]["recall"]["huorn"][precision] == recall[precision]


def test_two_profiles_side_by_side(traces: Path, run: Path, tmp_path: Path, call: Caller) -> None:
    done = call(
        "predictor", "train", "--traces", traces, "--layers", "7", "--out", tmp_path / "card", "--profile", "card",
        "--trunk", "128", "--epochs", "1", "--workers", "1",
    )  # fmt: skip
    assert done.code == 0, done.stderr
    done = call(
        "predictor", "evaluate", run, tmp_path / "card", "--traces", traces, "--json", tmp_path / "e.json"
    )
    assert done.code == 0, done.stderr
    found = json.loads((tmp_path / "e.json").read_text())
    assert found["recall"].keys() == {"huorn", "card"}
    assert_one_sentence(
        said(call)("predictor", "evaluate", run, run, "--traces", traces),
        "has the profile huorn, as one before it",
    )


def said(call: Caller):  # type: ignore[no-untyped-def]
    """What was printed before the mistake was met does not count."""
    return lambda *arguments: call(*arguments)._replace(stdout="")


def test_bad_use(traces: Path, run: Path, tmp_path: Path, call: Caller) -> None:
    out = tmp_path / "out"
    train = ("predictor", "train", "--out", out, "--traces")
    assert_one_sentence(call(*train, tmp_path), "is not a trace")
    assert_one_sentence(call(*train, traces, "--layers", "6-39"), "leaves the layers of the traces, 0 to 7")
    assert_one_sentence(call(*train, traces, "--layers", "six"), "--layers six is not understood")
    assert_one_sentence(call(*train, traces, "--text-tokens", "5000"), "--text-tokens is 5000", "4096")
    assert_one_sentence(call(*train, traces, "--without", "everything"), "no block of features")
    assert not out.exists()
    assert_one_sentence(
        call(*train, traces, "--text-tokens", "4", "--workers", "1"), "token id", "has no row"
    )
    for command in (
        ("evaluate", tmp_path, "--traces", traces),
        ("verify", tmp_path),
        ("release", tmp_path, "--out", out / "b"),
    ):
        result = call("predictor", *command)
        assert_one_sentence(result, str(tmp_path))
    strange = write(make([20] * 4, splits_of(2, 1, 1)), tmp_path / "strange")
    assert_one_sentence(
        call("predictor", "evaluate", run, "--traces", strange), "the bank is for 8 layers", "have 7"
    )
    assert_one_sentence(
        call("predictor", "release", run, "--out", out / "b", "--traces", strange),
        "is not what",
        "was trained on",
    )
    cut = Path(shutil.copytree(traces, tmp_path / "cut"))
    path = next(cut.glob("chunk-*/layer-03.bin"))
    path.write_bytes(path.read_bytes()[:-1])
    assert_one_sentence(call(*train, cut), "layer-03.bin", "cut short")
    path.unlink()
    assert_one_sentence(call(*train, cut), "layer-03.bin", "missing")


def test_verify_without_a_folder_is_about_the_embedded_bank(call: Caller) -> None:
    done = call("predictor", "verify")
    assert done.code == 0, done.stderr
    assert "all 12 files are as released; 8 heads for seedling" in done.stdout
    assert "the native int8 scorer uses" in done.stdout
