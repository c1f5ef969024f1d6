"""Every mistake a user can make: one sentence, exit code 2, no traceback, no work done first."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from .command_line import Caller, assert_one_sentence, huorn

CORES = len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--context", "0"], "--context is 0, but it must be from 1 to 2048"),
        (["--context", "-5"], "--context is -5"),
        (["--context", "2049"], "--context is 2049, but it must be from 1 to 2048"),
        (["--context", "3"], "leaves no room in a context of 3"),
        (["--max-tokens", "-1"], "--max-tokens is -1"),
        (["--threads", "0"], f"--threads is 0, but it must be from 1 to {CORES}"),
        (["--threads", "-2"], "--threads is -2"),
        (["--threads", str(CORES + 1)], f"--threads is {CORES + 1}"),
        (["--temperature", "nan"], "--temperature is nan"),
        (["--temperature", "-1"], "--temperature is -1"),
        (["--temperature", "hot"], "--temperature"),
        (["--top-p", "0"], "--top-p is 0"),
        (["--top-p", "1.5"], "--top-p is 1.5"),
        (["--top-k", "-1"], "--top-k is -1"),
        (["--top-k", "2.5"], "--top-k"),
        (["--min-p", "2"], "--min-p is 2"),
        (["--repetition-penalty", "0"], "--repetition-penalty is 0"),
        (["--presence-penalty", "inf"], "--presence-penalty is inf"),
        (["--frequency-penalty", "nan"], "--frequency-penalty is nan"),
        (["--seed", "-1"], "--seed is -1"),
        (["--stop", ""], "--stop is empty"),
        (["--precision", "fp4"], "--precision"),
        (["--nonsense"], "--nonsense"),
    ],
)
def test_options(call: Caller, tiny_model: Path, options: list[str], words: str) -> None:
    assert_one_sentence(call("run", "a prompt of some tokens", "--model", tiny_model, *options), words)


def test_in_a_process_of_its_own(tmp_path: Path) -> None:
    assert_one_sentence(huorn("run", "x", "--model", tmp_path / "none"), "none does not exist")


def test_limits_of_a_chat_are_refused_at_its_start(call: Caller, tmp_path: Path) -> None:
    """The model does not even exist: they come first."""
    assert_one_sentence(call("chat", "--stop", "", "--model", tmp_path / "none"), "--stop is empty")
    assert_one_sentence(
        call("chat", "--max-tokens", "-1", "--model", tmp_path / "none"), "--max-tokens is -1"
    )
    assert_one_sentence(call("run", "x", "--stop", "", "--model", tmp_path / "none"), "--stop is empty")
    for command in (["run", "x"], ["chat"]):
        assert_one_sentence(call(*command, "--stop", "a\udcff"), "--stop is not UTF-8: byte 1 is 0xff")


def test_commands_and_arguments(call: Caller) -> None:
    assert_one_sentence(call("fly"), "fly")
    assert_one_sentence(call("run"), "prompt")
    assert_one_sentence(call("run", "one", "two"), "two")


def test_model_paths(call: Caller, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    empty = tmp_path / "empty"
    empty.mkdir()
    assert_one_sentence(
        call("run", "x", "--model", tmp_path / "none"), "none does not exist", "folder of a checkpoint"
    )
    assert_one_sentence(call("run", "x", "--model", file), "file is a file")
    assert_one_sentence(call("run", "x", "--model", empty), "empty")
    assert_one_sentence(call("run", "x", "--model", "no\udcff"), "does not exist")


def test_prompts(call: Caller, tiny_model: Path) -> None:
    model = ("--model", tiny_model)
    assert_one_sentence(call("run", "", *model), "prompt is empty")
    assert_one_sentence(call("run", "-", *model, stdin=b""), "prompt is empty")
    assert_one_sentence(call("run", "-", *model, stdin=b"abc\xff\xfe"), "stdin is not UTF-8: byte 3 is 0xff")
    assert_one_sentence(call("run", "ab\udcff", *model), "the prompt is not UTF-8: byte 2 is 0xff")
    assert_one_sentence(
        call("run", "x y " * 3000, *model, "--context", "100"),
        "leaves no room in a context of 100",
        "up to 2048",
    )


@pytest.mark.parametrize(
    "command", [["run", "x"], ["chat"], ["bench", "decode"], ["verify", "."], ["doctor"]]
)
def test_a_json_path_that_can_not_be_written_is_found_first(
    call: Caller, tmp_path: Path, command: list[str]
) -> None:
    """The model does not even exist: the path comes first."""
    model = ["--model", str(tmp_path / "none")] if command[0] in ("run", "chat", "bench") else []
    for path in (tmp_path, tmp_path / "none" / "x.json", "/proc/nothing.json"):
        assert_one_sentence(call(*command, *model, "--json", path), "--json", "can not be written")


def test_a_mistake_leaves_no_json_file(call: Caller, tmp_path: Path) -> None:
    assert_one_sentence(call("run", "x", "--model", tmp_path / "none", "--json", tmp_path / "x.json"))
    assert not (tmp_path / "x.json").exists()


@pytest.fixture
def model_copy(tiny_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


def test_damaged_tokenizers(call: Caller, model_copy: Path) -> None:
    path = model_copy / "tokenizer.json"
    whole = json.loads(path.read_text())
    whole["model"]["vocab"]["a"] = 600
    path.write_text(json.dumps(whole))
    assert_one_sentence(call("run", "x", "--model", model_copy), "token ids up to 600", "vocab_size is 512")
    path.write_text("{")
    assert_one_sentence(call("run", "x", "--model", model_copy), "tokenizer.json is not valid JSON")
    path.unlink()
    assert_one_sentence(call("run", "x", "--model", model_copy), "tokenizer.json is missing")


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ raise_exception('not today') }}", "not today"),
        ("{{ ''.__class__.__mro__ }}", "sandbox"),
        ("{% if %}", "not a valid chat template"),
    ],
)
def test_templates_that_fail(call: Caller, model_copy: Path, template: str, words: str) -> None:
    (model_copy / "chat_template.jinja").write_text(template)
    result = call("chat", "--model", model_copy, stdin=b"hello\n")
    assert result.code == 2
    assert words in result.stderr.splitlines()[-1]
    assert result.stderr.splitlines()[-1].startswith("error: ")
    assert "Traceback" not in result.stderr


def test_a_model_without_a_template(call: Caller, model_copy: Path) -> None:
    (model_copy / "chat_template.jinja").unlink()
    assert_one_sentence(call("chat", "--model", model_copy), "no chat template", "use huorn run")


def test_images_in_a_chat(call: Caller, tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "chat.json"
    path.write_text(
        json.dumps([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "cat.png"}}]}])
    )
    assert_one_sentence(
        call("chat", "--model", tiny_model, "--load", path), "message 1 holds an image", "text only"
    )


def test_weights_that_are_not_there(call: Caller, model_copy: Path) -> None:
    (model_copy / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    assert_one_sentence(call("run", "x", "--model", model_copy), "model.safetensors")


def test_bench_limits(call: Caller, tiny_model: Path) -> None:
    bench = ("bench", "decode", "--model", tiny_model)
    assert_one_sentence(call(*bench, "--repeats", "0"), "--repeats is 0")
    assert_one_sentence(call(*bench, "--max-tokens", "1"), "--max-tokens is 1")
    assert_one_sentence(call(*bench, "--prompt-tokens", "0"), "--prompt-tokens is 0")
    assert_one_sentence(
        call(*bench, "--prompt-tokens", "100", "--context", "120"), "do not fit in a context of 120"
    )


def test_sequences_do_not_break_the_promise(call: Caller) -> None:
    assert_one_sentence(
        call("bench", "decode", "--sequences", "2", "--memory", "400MB"), "--sequences", "--slots"
    )
    assert_one_sentence(
        call("bench", "decode", "--sequences", "1000000000"), "--sequences 1000000000 need", "are free"
    )
