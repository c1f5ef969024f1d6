"""Training: what is learned, what is not, and that an interruption changes no bit."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from huorn.errors import TraceError, UsageError
from huorn.predictor.bank import bank_from_run
from huorn.predictor.evaluate import evaluate
from huorn.predictor.release.export import release
from huorn.predictor.release.verify import verify_bank
from huorn.predictor.released import open_bank
from huorn.predictor.run_folder import (
    STATE,
    WEIGHTS,
    RunSpec,
    TrainSettings,
    head_folder,
    read_tensors,
    write_tensors,
)
from huorn.predictor.train import make_spec, parse_layers, train
from huorn.predictor.train_head import HeadTraining
from huorn.trace.recording import Traces
from tests.predictor.made_traces import FINGERPRINT, make, splits_of, write

SETTINGS = TrainSettings(trunk=128, epochs=3, batch=64, learning_rate=1e-2)
COUNTS = [60] * 24
SPLITS = splits_of(16, 4, 4)


def quiet(*_: int) -> None:
    pass


def train_card(
    folder: Path, run: Path, layers: list[int], workers: int = 1, settings: TrainSettings = SETTINGS
) -> RunSpec:
    traces = Traces.open(folder)
    spec = make_spec(traces, "card", settings)
    train(traces, spec, layers, run, workers, None, quiet)
    return spec


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(make(COUNTS, SPLITS), tmp_path_factory.mktemp("made") / "traces")


def test_heads_learn_what_the_next_token_says(folder: Path, tmp_path: Path) -> None:
    train_card(
        folder,
        tmp_path / "run",
        [0, 6],
        settings=TrainSettings(trunk=128, epochs=12, batch=64, learning_rate=1e-2),
    )
    bank, full = bank_from_run(tmp_path / "run")
    found = evaluate(bank, full, Traces.open(folder), quiet)
    count, test = (
        found.baselines["count_table"]["test"]["mean"]["8"],
        found.recall["bf16"]["test"]["mean"]["8"],
    )
    assert test > found.baselines["popularity"]["test"]["mean"]["8"] + 0.1
    assert test > count - 0.05
    for precision in ("f32", "int8"):
        assert abs(found.recall[precision]["test"]["mean"]["8"] - test) < 0.01
    assert found.without["tokens"]["mean"]["8"] < found.recall["bf16"]["validation"]["mean"]["8"] - 0.1
    assert (tmp_path / "run" / "curves.png").read_bytes()[:4] == b"\x89PNG"
    # The test split's own text counts: what is beyond step 16 and before it are all its rows.
    assert (
        sum(row["rows"] for row in found.by_position["test"].values()) == 2 * found.rows["test"] == 2 * 4 * 59
    )


def test_shuffled_targets_leave_popularity(tmp_path: Path) -> None:
    made = make(COUNTS, SPLITS, shuffled=True)
    folder = write(made, tmp_path / "traces")
    train_card(folder, tmp_path / "run", [4])
    bank, full = bank_from_run(tmp_path / "run")
    found = evaluate(bank, full, Traces.open(folder), quiet)
    popularity = found.baselines["popularity"]["test"]["mean"]
    assert found.recall["bf16"]["test"]["mean"]["8"] == pytest.approx(popularity["8"], abs=0.05)
    assert found.recall["bf16"]["test"]["mean"]["8"] < 0.9  # 8 of 12 experts


def test_workers_change_no_bit(folder: Path, tmp_path: Path) -> None:
    train_card(folder, tmp_path / "one", [1, 5])
    train_card(folder, tmp_path / "two", [1, 5], workers=2)
    for layer in (1, 5):
        files = [(head_folder(tmp_path / name, layer) / WEIGHTS).read_bytes() for name in ("one", "two")]
        assert files[0] == files[1]


def test_every_state_goes_on_to_the_same_weights(folder: Path, tmp_path: Path) -> None:
    """Interrupted after each of many steps, in and between epochs: saved, loaded into a new object, and finished there."""
    traces = Traces.open(folder)
    spec = make_spec(traces, "card", SETTINGS)
    from huorn.predictor.profiles import token_table

    table = token_table(spec.features)
    torch.set_num_threads(1)
    straight = HeadTraining(traces, spec, table, 3)
    while not straight.finished:
        straight.one_step()
    want = straight.finish()
    for stop in (1, 7, straight.steps_per_epoch, straight.steps_per_epoch + 3, straight.steps - 1):
        first = HeadTraining(traces, spec, table, 3)
        for _ in range(stop):
            first.one_step()
        first.save(tmp_path / "state")
        second = HeadTraining(traces, spec, table, 3)
        second.load(tmp_path / "state")
        while not second.finished:
            second.one_step()
        assert second.progress == straight.progress
        for name, tensor in second.finish().items():
            assert torch.equal(tensor, want[name]), (stop, name)


KILLED = """
import sys
from pathlib import Path
import huorn.predictor.train_head as train_head
from huorn.predictor.run_folder import TrainSettings
from huorn.predictor.train import make_spec, train
from huorn.trace.recording import Traces
train_head.SAVE_SECONDS = 0.0  # after every step
traces = Traces.open(Path(sys.argv[1]))
spec = make_spec(traces, "card", TrainSettings(trunk=128, epochs=3, batch=64, learning_rate=1e-2))
train(traces, spec, [2], Path(sys.argv[2]), 1, None, lambda *_: None)
"""


def test_kill_9_and_going_on_ends_with_the_same_file(folder: Path, tmp_path: Path) -> None:
    train_card(folder, tmp_path / "straight", [2])
    run, kills = tmp_path / "killed", 0
    weights = head_folder(run, 2) / WEIGHTS
    state = head_folder(run, 2) / STATE
    for _ in range(3):
        process = subprocess.Popen([sys.executable, "-c", KILLED, str(folder), str(run)])
        before = state.stat().st_mtime_ns if state.exists() else 0
        while process.poll() is None and not (state.exists() and state.stat().st_mtime_ns > before):
            time.sleep(0.01)
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
            kills += 1
        process.wait()
    assert kills >= 1
    assert not weights.exists() or kills == 3
    subprocess.run([sys.executable, "-c", KILLED, str(folder), str(run)], check=True)
    assert weights.read_bytes() == (head_folder(tmp_path / "straight", 2) / WEIGHTS).read_bytes()
    assert not state.exists()


WORKERS = """
import sys
from pathlib import Path
import huorn.predictor.train_head as train_head
from huorn.predictor.run_folder import TrainSettings
from huorn.predictor.train import make_spec, train
from huorn.trace.recording import Traces
train_head.SAVE_SECONDS = 0.0  # in the workers too, which import this file
if __name__ == "__main__":
    traces = Traces.open(Path(sys.argv[1]))
    spec = make_spec(traces, "card", TrainSettings(trunk=128, epochs=3000, patience=3000, batch=64))
    train(traces, spec, [1, 2, 3, 4], Path(sys.argv[2]), 2, None, lambda *_: None)
"""


def test_workers_end_when_their_parent_is_killed(folder: Path, tmp_path: Path) -> None:
    """Otherwise they would go on writing beside those of the next call."""
    script = tmp_path / "train.py"
    script.write_text(WORKERS)
    process = subprocess.Popen([sys.executable, str(script), str(folder), str(tmp_path / "run")])
    states = [head_folder(tmp_path / "run", layer) / STATE for layer in (1, 2)]
    until = time.monotonic() + 60
    while not any(state.exists() for state in states) and time.monotonic() < until:
        time.sleep(0.05)
    other = subprocess.run(
        [sys.executable, str(script), str(folder), str(tmp_path / "run")], capture_output=True, text=True
    )
    assert "is being written by another huorn" in other.stderr
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    time.sleep(3)
    before = [path.stat().st_mtime_ns for path in tmp_path.rglob("*.safetensors")]
    time.sleep(1)
    assert before == [path.stat().st_mtime_ns for path in tmp_path.rglob("*.safetensors")]


def test_early_stopping_keeps_the_best_epoch(folder: Path) -> None:
    traces = Traces.open(folder)
    spec = make_spec(traces, "card", TrainSettings(trunk=256, epochs=60, batch=64, learning_rate=3e-2))
    from huorn.predictor.profiles import token_table

    training = HeadTraining(traces, spec, token_table(spec.features), 4)
    while not training.finished:
        training.one_step()
    losses = [line["validation_loss"] for line in training.progress.curve]
    assert len(losses) < 60, "it did not overfit"
    assert len(losses) - 1 - losses.index(min(losses)) == spec.settings.patience
    training.finish()
    assert training.validate()[0] == min(losses)


def test_routing_alone(tmp_path: Path) -> None:
    """Imported traces know neither states nor text; the profile for them reads expert ids."""
    folder = write(make(COUNTS, SPLITS), tmp_path / "traces", ("ids", "weights"))
    traces = Traces.open(folder)
    with pytest.raises(UsageError, match="--profile routing"):
        make_spec(traces, "huorn", SETTINGS)
    spec = make_spec(traces, "routing", SETTINGS)
    train(traces, spec, [0, 3], tmp_path / "run", 1, None, quiet)
    bank, full = bank_from_run(tmp_path / "run")
    found = evaluate(bank, full, traces, quiet)
    assert set(found.baselines) == {"repeat", "ema", "popularity"}
    release(bank, found, tmp_path / "bank", "")
    assert verify_bank(tmp_path / "bank").gate.native_bound_used is None
    assert 0 < found.recall["int8"]["test"]["mean"]["8"] <= 1


def test_routing_alone_on_traces_that_have_more(folder: Path, tmp_path: Path) -> None:
    traces = Traces.open(folder)
    train(traces, make_spec(traces, "routing", SETTINGS), [1], tmp_path / "run", 1, None, quiet)
    bank, full = bank_from_run(tmp_path / "run")
    release(bank, evaluate(bank, full, traces, quiet), tmp_path / "bank", "")
    assert (
        evaluate(open_bank(tmp_path / "bank"), None, traces, quiet).recall["int8"]["test"]["mean"]["12"]
        == 1.0
    )


@pytest.mark.parametrize("what", ["ids", "token"])
def test_experts_and_tokens_that_do_not_exist_are_named(what: str, tmp_path: Path) -> None:
    made = make([10, 10, 10], splits_of(1, 1, 1))
    if what == "ids":
        made.ids[3, 4, 1] = 12
    else:
        made.token[4] = -1
    traces = Traces.open(write(made, tmp_path / "t"))
    with pytest.raises(TraceError, match=r"holds an expert that is none of 12|holds a token id below 0"):
        train(traces, make_spec(traces, "card", SETTINGS), [3], tmp_path / "run", 1, None, quiet)


def test_what_is_wrong_is_said(folder: Path, tmp_path: Path) -> None:
    traces = Traces.open(folder)
    for text, words in (
        ("6-9", "leaves the layers of the traces, 0 to 6"), ("3-1", "leaves"), ("x", "not understood"), ("", "not understood"),
        ("1-2-3", "not understood"), ("٣", "not understood"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=words):
            parse_layers(text, 7)
    assert parse_layers("5,0-2, 1", 7) == [0, 1, 2, 5]
    for settings, words in (
        (TrainSettings(trunk=0), "--trunk is 0"), (TrainSettings(trunk=128, pool=0), "--pool is 0"),
        (TrainSettings(trunk=128, epochs=0), "--epochs is 0"), (TrainSettings(trunk=128, batch=0), "--batch is 0"),
        (TrainSettings(trunk=100), "--trunk is 100"), (TrainSettings(trunk=128 * 10**9), "--trunk is 128000000000"),
        (TrainSettings(trunk=128, learning_rate=float("nan")), "--learning-rate is nan"),
        (TrainSettings(trunk=128, learning_rate=-1.0), "--learning-rate is -1"),
        (TrainSettings(trunk=128, seed=-1), "--seed is -1"),
        (TrainSettings(trunk=128, seed=10**20), "--seed is 1"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=words):
            make_spec(traces, "card", settings)
    with pytest.raises(UsageError, match="--without x is no block"):
        make_spec(traces, "card", SETTINGS, ("x",))
    with pytest.raises(
        UsageError, match=r"fingerprint abab.*, the embedded model has [0-9a-f]{64}: give --model DIR"
    ):
        train(traces, make_spec(traces, "huorn", SETTINGS), [0], tmp_path / "huorn", 1, None, quiet)
    assert not (tmp_path / "huorn").exists()
    with pytest.raises(UsageError, match="--uncaptured 9 leaves"):
        parse_layers("9", 7, "--uncaptured")
    spec = train_card(folder, tmp_path / "run", [0])
    with pytest.raises(UsageError, match="holds a run with other settings"):
        train(
            traces, make_spec(traces, "card", TrainSettings(trunk=256)), [0], tmp_path / "run", 1, None, quiet
        )
    with pytest.raises(UsageError, match="--workers is 0"):
        train(traces, spec, [0], tmp_path / "run", 0, None, quiet)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    with pytest.raises(UsageError, match=r"is not empty and holds no run\.json"):
        train(traces, spec, [0], tmp_path / "other", 1, None, quiet)
    (head_folder(tmp_path / "run", 0) / WEIGHTS).unlink()
    with pytest.raises(UsageError, match="has no finished head"):
        bank_from_run(tmp_path / "run")


def test_damaged_values_are_named(tmp_path: Path) -> None:
    made = make([10, 10, 10], splits_of(1, 1, 1))
    made.hidden[3, 4, 2] = float("nan")
    traces = Traces.open(write(made, tmp_path / "t"))
    spec = make_spec(traces, "card", SETTINGS)
    with pytest.raises(TraceError, match="holds NaN or infinity in hidden of layer 3, in row 4 of the split"):
        train(traces, spec, [3], tmp_path / "run", 1, None, quiet)


def test_an_empty_split_is_named(tmp_path: Path) -> None:
    traces = Traces.open(write(make([10, 1, 10], splits_of(1, 1, 1)), tmp_path / "t"))
    with pytest.raises(TraceError, match="no prompt of 2 or more rows in its validation split"):
        train(traces, make_spec(traces, "card", SETTINGS), [3], tmp_path / "run", 1, None, quiet)


def test_traces_of_another_model_are_refused_unless_forced(folder: Path, tmp_path: Path) -> None:
    train_card(folder, tmp_path / "run", [0])
    bank, full = bank_from_run(tmp_path / "run")
    manifest = folder / "manifest.json"
    other = tmp_path / "other"
    other.mkdir()
    for chunk in folder.glob("chunk-*"):
        (other / chunk.name).symlink_to(chunk)
    (other / "manifest.json").write_text(manifest.read_text().replace(FINGERPRINT, "cd" * 32))
    traces = Traces.open(other)
    with pytest.raises(UsageError, match=f"{FINGERPRINT}, the traces are of made with {'cd' * 32}.*--force"):
        evaluate(bank, full, traces, quiet)
    forced = evaluate(bank, full, traces, quiet, force=True)
    assert forced.forced is not None
    assert FINGERPRINT in forced.forced
    assert forced.recall == evaluate(bank, full, Traces.open(folder), quiet).recall
    assert read_tensors(head_folder(tmp_path / "run", 0) / WEIGHTS)[1]["run"]


def test_steps_are_those_of_torchs_adam(folder: Path) -> None:
    traces = Traces.open(folder)
    spec = make_spec(traces, "card", SETTINGS)
    from huorn.predictor.profiles import token_table

    training = HeadTraining(traces, spec, token_table(spec.features), 5)
    other = {
        name: value.detach().clone().requires_grad_() for name, value in training.head.named_parameters()
    }
    adam = torch.optim.Adam(other.values(), lr=1.0, betas=(0.9, 0.98), eps=1e-8)
    for number in range(5):
        training.one_step()
        # Warm-up over 100 steps, then down to 0 over all of them.
        adam.param_groups[0]["lr"] = 1e-2 * (number + 1) / 100 * (1 - number / training.steps)
        for name, value in training.head.named_parameters():
            assert value.grad is not None
            other[name].grad = value.grad.clone()
        adam.step()
    for name, value in training.head.named_parameters():
        torch.testing.assert_close(value, other[name], rtol=1e-5, atol=1e-7)


def test_a_run_whose_files_were_changed_is_refused(folder: Path, tmp_path: Path) -> None:
    train_card(folder, tmp_path / "run", [0, 6])
    traces = Traces.open(folder)
    spec = make_spec(traces, "card", SETTINGS)
    number = 0

    def refused(change: Callable[[Path], object], words: str, *, training: bool = True) -> None:
        nonlocal number
        number += 1
        run = Path(shutil.copytree(tmp_path / "run", tmp_path / f"changed{number}"))
        change(run)
        with pytest.raises(UsageError, match=words):
            bank_from_run(run)
        if training:
            with pytest.raises(UsageError, match=words):
                train(traces, spec, [0, 6], run, 1, None, quiet)

    def swap(run: Path) -> None:
        (run / "head-00").rename(run / "x")
        (run / "head-06").rename(run / "head-00")
        (run / "x").rename(run / "head-06")

    def flip(name: str) -> Callable[[Path], None]:
        def change(run: Path) -> None:
            data = bytearray((run / name).read_bytes())
            data[-9] ^= 1
            (run / name).write_bytes(data)

        return change

    refused(swap, "is of another run or layer")
    refused(flip("head-00/head.safetensors"), "head.safetensors is damaged")
    refused(flip("token_table.safetensors"), "token_table.safetensors is damaged")
    refused(lambda run: (run / "head-06" / WEIGHTS).write_bytes(b""), "can not be read")
    refused(lambda run: write_tensors(run / "token_table.safetensors", {}), "holds no token_table")
    refused(lambda run: (run / "run.json").write_text("[" * 100_000), "run.json is damaged")
    refused(lambda run: (run / "run.json").write_text("[]"), "run.json is damaged")

    stray = Path(shutil.copytree(tmp_path / "run", tmp_path / "stray"))
    shutil.copytree(stray / "head-06", stray / "head-99")
    assert bank_from_run(stray)[0].config.heads.layers == (0, 6)
    for content in (b"\xff\xfe", b"epoch\n1\n"):
        (stray / "head-06" / "curve.csv").write_bytes(content)
        with pytest.raises(UsageError, match=r"curve\.csv is damaged"):
            train(traces, spec, [0, 6], stray, 1, None, quiet)
