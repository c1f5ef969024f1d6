"""doctor, verify, synth and bench from the command line."""

from __future__ import annotations

import json
from pathlib import Path

from .command_line import Caller, assert_one_sentence


def test_doctor(call: Caller, tmp_path: Path) -> None:
    result = call("doctor", "--json", tmp_path / "doctor.json", "--disk", tmp_path)
    assert result.code == 0, result.stderr
    for fact in ("cores", "instruction sets", "read speed", "reference"):
        assert fact in result.stdout
    assert json.loads((tmp_path / "doctor.json").read_text())["cores_usable"] >= 1


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
    assert call("verify", tmp_path / "none").code == 2


def test_bench_decode(call: Caller, tiny_model: Path, tmp_path: Path) -> None:
    result = call(
        "bench", "decode", "--model", tiny_model, "--prompt-tokens", "20", "--max-tokens", "8", "--repeats", "3",
        "--threads", "1", "--json", tmp_path / "bench.json",
    )  # fmt: skip
    assert result.code == 0, result.stderr
    saved = json.loads((tmp_path / "bench.json").read_text())
    for name in ("prefill", "decode"):
        speed = saved[f"{name}_tok_s"]
        assert 0 < speed["minimum"] <= speed["median"] <= speed["maximum"]
        assert f"median {speed['median']:.1f} tok/s" in result.stdout
    assert (saved["prompt_tokens"], saved["completion_tokens"], saved["repeats"]) == (20, 8, 3)
    assert saved["settings"]["threads"] == 1
