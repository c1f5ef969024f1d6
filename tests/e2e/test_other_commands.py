"""doctor, verify, synth and bench from the command line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from huorn import __version__

from .command_line import Caller, assert_one_sentence


def test_doctor(call: Caller, tmp_path: Path) -> None:
    result = call("doctor", "--json", tmp_path / "doctor.json", "--disk", tmp_path)
    assert result.code == 0, result.stderr
    for fact in ("cores", "instruction sets", "read speed", "reference"):
        assert fact in result.stdout
    assert json.loads((tmp_path / "doctor.json").read_text())["cores_usable"] >= 1


def test_doctor_of_a_disk_that_is_not_there(call: Caller, tmp_path: Path) -> None:
    assert_one_sentence(
        call("doctor", "--disk", tmp_path / "none"),
        "--disk",
        "none: No such file or directory; name a folder",
    )


def test_version(call: Caller) -> None:
    result = call("--version")
    assert (result.code, result.stdout, result.stderr) == (0, f"huorn {__version__}\n", "")


def test_synth_verify_and_run(call: Caller, tmp_path: Path) -> None:
    out, report = tmp_path / "model", tmp_path / "verify.json"
    made = call("synth", "--preset", "tiny-fp8", "--out", out, "--seed", "5", "--manifest")
    assert made.code == 0, made.stderr
    assert "4 layers, seed 5" in made.stdout
    whole = call("verify", out, "--json", report)
    assert whole.code == 0, whole.stderr
    assert whole.stdout.splitlines()[-1] == "whole"
    saved = json.loads(report.read_text())
    assert saved["ok"]
    assert saved["checksums_matched"] > 2
    assert call("run", "x", "--model", out, "--max-tokens", "3").code == 0
    assert_one_sentence(call("synth", "--preset", "tiny-fp8", "--out", out), "model")
    assert_one_sentence(
        call("synth", "--preset", "none", "--out", tmp_path / "x"), "--preset none is unknown"
    )
    for preset, overlap, words in (
        ("qwen3.5-35b-a3b-fp8", "0.9", "--overlap 0.9 is out of range; give 0.2 to 0.6"),
        ("tiny-fp8", "0.3", "--overlap can not be had with --preset tiny-fp8"),
    ):
        wrong = call("synth", "--preset", preset, "--overlap", overlap, "--out", tmp_path / "x")
        assert_one_sentence(wrong, words)
    assert not (tmp_path / "x").exists()


def test_verify_names_the_damage(call: Caller, tmp_path: Path) -> None:
    out, report = tmp_path / "model", tmp_path / "verify.json"
    call("synth", "--preset", "tiny-fp8", "--out", out)
    shard = min(out.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-100])
    result = call("verify", out, "--json", report)
    assert result.code == 2
    assert shard.name in result.stdout
    assert result.stderr.splitlines()[-1].startswith("error: ")
    assert not json.loads(report.read_text())["ok"]


def test_verify_of_what_is_no_checkpoint_is_one_sentence(call: Caller, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    for name, words in (("none", "does not exist"), ("empty", "is empty"), ("file", "is a file")):
        assert_one_sentence(call("verify", tmp_path / name), f"{name} {words}")
    assert_one_sentence(call("verify", tmp_path / "empty", "--json", tmp_path / "x.json"), "is empty")
    assert not (tmp_path / "x.json").exists()


def test_verify_opens_the_files_beside_the_weights(call: Caller, tiny_model: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    assert call("verify", model).code == 0
    for name, content, words in (
        ("generation_config.json", "[]", "generation_config.json holds a JSON list"),
        ("chat_template.jinja", "{% if %}", "chat_template.jinja is not a valid chat template"),
        ("tokenizer_config.json", "{", "tokenizer_config.json is not valid JSON"),
        ("tokenizer.json", "{}", "tokenizer.json is not a tokenizer"),
        ("tokenizer.json", None, "tokenizer.json is missing"),
    ):
        path = model / name
        kept = path.read_text() if path.exists() else None
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_text(content)
        result = call("verify", model)
        assert result.code == 2, name
        problems = [line for line in result.stdout.splitlines() if line.startswith("problem: ")]
        assert len(problems) == 1, result.stdout
        assert words in problems[0]
        assert "whole" not in result.stdout
        path.unlink(missing_ok=True)
        if kept is not None:
            path.write_text(kept)


def test_a_folder_whose_name_is_no_utf8(call: Caller, tiny_model: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(tiny_model, tmp_path / "n\udcff"))
    for command in (("verify", model), ("run", "x", "--max-tokens", "1", "--model", model)):
        result = call(*command, "--json", tmp_path / "x.json")
        assert result.code == 0, result.stderr
        assert "\\udcff" in (tmp_path / "x.json").read_text()


def test_bench_decode(call: Caller, tiny_model: Path, tmp_path: Path) -> None:
    result = call(
        "bench", "decode", "--model", tiny_model, "--prompt-tokens", "20", "--max-tokens", "8", "--repeats", "3",
        "--threads", "1", "--json", tmp_path / "bench.json",
    )  # fmt: skip
    assert result.code == 0, result.stderr
    saved = json.loads((tmp_path / "bench.json").read_text())
    for name in ("prefill", "decode"):
        speeds = sorted(saved[f"{name}_tok_s_all"])
        assert 0 < speeds[0] <= saved[f"{name}_tok_s"] == speeds[1]
        assert f"median {speeds[1]:.1f} tok/s" in result.stdout
    assert 0 < saved["limit_fraction"] < 1
    assert saved["limit_fraction"] == pytest.approx(
        saved["ram_bytes_per_token"] * saved["decode_tok_s"] / saved["read_bandwidth_bytes_s"]
    )
    assert 0 < saved["python_s_per_token"] < 1
    assert (saved["prompt_tokens"], saved["completion_tokens"], saved["repeats"]) == (20, 8, 3)
    assert saved["settings"]["threads"] == 1
    assert (saved["settings"]["lm_head"], saved["rescored_rows_per_token"]) == ("full", None)


def test_bench_decode_in_two_passes(
    call: Caller, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is read falls by the BF16 head, less codes and the rows that were multiplied again."""
    monkeypatch.setattr("huorn.model.tables.LARGE_BYTES", 0)
    rows, width = 512, 32  # of tiny_model
    for sequences in (1, 3):
        saved = {}
        for kind in ("two-pass", "full"):
            result = call(
                "bench", "decode", "--model", tiny_model, "--prompt-tokens", "20", "--max-tokens", "8", "--repeats", "1",
                "--threads", "1", "--lm-head", kind, "--sequences", str(sequences), "--json", tmp_path / "bench.json",
            )  # fmt: skip
            assert result.code == 0, result.stderr
            saved[kind] = json.loads((tmp_path / "bench.json").read_text())
            assert saved[kind]["settings"]["lm_head"] == kind
            assert ("rows in BF16 a token" in result.stdout) == (kind == "two-pass")
        again = sequences * saved["two-pass"]["rescored_rows_per_token"]
        assert 1 <= again / sequences <= 40
        gained = saved["full"]["ram_bytes_per_token"] - saved["two-pass"]["ram_bytes_per_token"]
        passes = rows * width * 2 - rows * (width + 8)
        # the mean over all tokens stands for that over the timed ones, so only about
        assert gained == pytest.approx(passes - again * width * 2, abs=sequences * 20 * width * 2)


def test_an_unknown_lm_head(call: Caller) -> None:
    assert_one_sentence(
        call("run", "x", "--lm-head", "three-pass"), "'three-pass' is not one of 'two-pass', 'full'"
    )
