"""huorn trace from the command line: recorded, killed, gone on with, shown, imported; mistakes in one sentence."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from huorn.assets import EMBEDDED_MODEL

from .command_line import COMMAND, Caller, assert_one_sentence, huorn

CODE = (
    "def quicksort(items):\n", "import os\nimport sys\n", "class Stack:\n    def __init__(self):\n", "# A README\n\nThis is",
    "#include <stdio.h>\n", '{"name": "x",\n', "for line in file:\n", "The quick brown fox", "SELECT a FROM",
)  # fmt: skip


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "p.jsonl"
    lines = [{"prompt": text, "completion": text * 3} for text in (*CODE, CODE[0])]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    return path


def record(prompts: Path, out: Path, *options: str) -> list[str | Path]:
    return [
        "trace",
        "record",
        "--prompts",
        prompts,
        "--out",
        out,
        "--tokens",
        "48",
        "--threads",
        "1",
        *options,
    ]


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def recorded(prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Without interruption, in chunks of three prompts or so."""
    out = tmp_path_factory.mktemp("traces") / "t"
    result = huorn(*record(prompts, out, "--chunk-rows", "100"))
    assert result.code == 0, result.stderr
    assert "10 prompts, split by groups of duplicates" in result.stdout
    assert "1 prompt equal to one before, such as number 9 to 0" in result.stdout
    assert f"{out} is recorded: " in result.stdout
    return out


def start(arguments: list[str | Path]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*COMMAND, *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def wait_for(condition: object, process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + 120
    while not condition():  # type: ignore[operator]
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.002)


def test_killed_in_the_middle_of_a_chunk_it_goes_on_to_the_same_bytes(
    recorded: Path, prompts: Path, tmp_path: Path
) -> None:
    out = tmp_path / "t"
    arguments = record(prompts, out, "--chunk-rows", "100")
    for chunk in (0, 2):
        process = start(arguments)
        wait_for((out / f".chunk-{chunk:05d}.partial").exists, process)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert (out / f".chunk-{chunk:05d}.partial").exists()
        assert len(json.loads((out / "manifest.json").read_text())["chunks"]) == chunk
    result = huorn(*arguments)
    assert result.code == 0, result.stderr
    assert "going on behind" in result.stderr
    assert files_of(out) == files_of(recorded)
    again = huorn(*arguments)
    assert (again.code, again.stderr) == (0, "")
    assert "was recorded already" in again.stdout


def test_ctrl_c_keeps_whole_chunks(recorded: Path, prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "t"
    arguments = record(prompts, out, "--chunk-rows", "100")
    process = start(arguments)
    wait_for((out / ".chunk-00001.partial").exists, process)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "prompts are in whole chunks; the same command goes on behind them" in stderr
    assert "Traceback" not in stderr
    assert sorted(path.name for path in out.iterdir()) == ["chunk-00000", "manifest.json"]
    assert huorn(*arguments).code == 0
    assert files_of(out) == files_of(recorded)


def test_slots_and_memory(call: Caller, recorded: Path, prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "t"
    result = call(*record(prompts, out, "--chunk-rows", "100", "--slots", "0.25"))
    assert result.code == 0, result.stderr
    assert "128 slots for 512 experts" in result.stderr
    assert files_of(out) == files_of(recorded)


def test_show(call: Caller, recorded: Path, tmp_path: Path) -> None:
    out, picture = tmp_path / "show.json", tmp_path / "layers.png"
    plain = call("trace", "show", recorded)
    assert plain.code == 0, plain.stderr
    assert "no next-layer gate: it needs the router weights" in plain.stdout
    result = call(
        "trace", "show", recorded, "--model", EMBEDDED_MODEL, "--verify", "--plot", picture, "--json", out
    )
    assert result.code == 0, result.stderr
    for words in (
        "seedling, 8 layers, 8 of 64 experts, mode decode",
        "next gate at 8",
        "every checksum fits",
    ):
        assert words in result.stdout
    saved = json.loads(out.read_text())
    assert saved["schema"] == "huorn trace v1"
    assert sum(split["rows"] for split in saved["splits"].values()) == saved["rows"] > 100
    assert len(saved["layers"]) == 8
    for number, layer in enumerate(saved["layers"]):
        assert saved["chance_overlap"] == 0.125 < layer["overlap"] < 1
        assert 0.25 < layer["hottest_quarter"] < 1
        assert (
            number == 0 or 0.3 < layer["next_gate"]["at_8"] < 1
        )  # one layer early is a good guess: 0.77 to 0.84
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_teacher(call: Caller, prompts: Path, tmp_path: Path) -> None:
    result = call(*record(prompts, tmp_path / "t", "--mode", "teacher"))
    assert result.code == 0, result.stderr
    manifest = json.loads((tmp_path / "t" / "manifest.json").read_text())
    assert (manifest["mode"], manifest["tokens"]) == ("teacher", 48)
    assert {prompt["split"] for prompt in manifest["prompts"]} == {"train", "validation", "test"}
    first, copy = manifest["prompts"][0], manifest["prompts"][9]
    assert (first["group"], first["split"]) == (copy["group"], copy["split"])


def test_import(call: Caller, tmp_path: Path) -> None:
    csv = Path(__file__).parents[3] / "shared" / "traces" / "qwen.route.csv"
    if not csv.is_file():
        pytest.skip("shared/traces/qwen.route.csv is not here")
    result = call("trace", "import", csv, "--out", tmp_path / "t")
    assert result.code == 0, result.stderr
    assert "128 decode steps of Qwen3-30B-A3B-Q4_K_M.gguf, 48 layers" in result.stdout
    shown = call("trace", "show", tmp_path / "t", "--verify")
    assert "split by time" in shown.stdout
    assert "no next-layer gate: hidden states were not recorded" in shown.stdout
    assert_one_sentence(
        call("trace", "show", tmp_path / "t", "--model", EMBEDDED_MODEL), "holds no hidden states"
    )


def test_mistakes(call: Caller, recorded: Path, prompts: Path, tmp_path: Path) -> None:
    none, out = tmp_path / "none", tmp_path / "out"
    two = tmp_path / "two.jsonl"
    two.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    for arguments, words in (
        (record(none, out), "none can not be read: No such file"),
        (record(two, out), "the prompts are 2 groups of duplicates"),
        (record(prompts, out, "--tokens", "1"), "--tokens is 1, but it must be 2 or more"),
        (record(prompts, out, "--chunk-rows", "0"), "--chunk-rows is 0"),
        (record(prompts, out, "--mode", "guess"), "--mode"),
        (record(prompts, out, "--threads", "0"), "--threads is 0"),
        (record(prompts, out, "--memory", "1MiB"), "this model needs at least"),
        (record(prompts, none / "deep"), "deep can not be made: No such file"),
        (record(prompts, recorded, "--mode", "teacher"), "another mode (decode there, teacher here)"),
        (record(prompts, recorded, "--tokens", "47"), "another --tokens (48 there, 47 here)"),
        (record(two, recorded, "--model", str(none)), "none does not exist"),
        (["trace", "show", none], "none is not a trace: it is no folder"),
        (["trace", "show", tmp_path], "is not a trace: it has no manifest.json"),
        (["trace", "show", recorded, "--plot", tmp_path / "x.txt"], "x.txt must end in .png"),
        (["trace", "show", recorded, "--plot", none / "x.png"], "can not be written"),
        (["trace", "import", prompts, "--out", out], "is not a route trace"),
        (["trace", "fly"], "fly"),
    ):
        result = call(*arguments)
        if "this model needs" in words:  # splits are printed by then
            assert result.code == 2
            assert words in result.stderr
        else:
            assert_one_sentence(result, words)
        assert not out.exists(), arguments


def test_another_state_of_the_model_is_refused(
    call: Caller, recorded: Path, prompts: Path, tmp_path: Path
) -> None:
    """One changed bit of one router."""
    model = tmp_path / "model"
    shutil.copytree(EMBEDDED_MODEL, model, ignore=shutil.ignore_patterns("__pycache__"))
    os.chmod(model / "model.safetensors", 0o644)
    raw = bytearray((model / "model.safetensors").read_bytes())
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    (name,) = (name for name in header if name.endswith("layers.3.mlp.gate.weight"))
    raw[8 + size + header[name]["data_offsets"][0]] ^= 1
    (model / "model.safetensors").write_bytes(raw)
    result = call(*record(prompts, recorded, "--chunk-rows", "100", "--model", str(model)))
    assert_one_sentence(result, "holds a recording of another model")
    assert_one_sentence(call("trace", "show", recorded, "--model", model), "was recorded of another model")


def test_a_plot_without_matplotlib(
    call: Caller, recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = call("trace", "show", recorded, "--plot", tmp_path / "x.png")
    assert_one_sentence(result, "--plot needs matplotlib, which is not installed")
