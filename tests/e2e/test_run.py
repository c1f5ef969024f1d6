"""`huorn run` as a user meets it."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from .command_line import COMMAND, Caller, huorn

PROMPT = "def quicksort(items):"


def test_text_goes_to_stdout_and_figures_to_stderr(tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    began = time.monotonic()
    result = huorn(
        "run",
        PROMPT,
        "--model",
        tiny_model,
        "--max-tokens",
        "20",
        "--context",
        "512",
        "--threads",
        "1",
        "--json",
        path,
    )
    took = time.monotonic() - began
    assert result.code == 0, result.stderr
    saved = json.loads(path.read_text())
    assert result.stdout == saved["text"] != ""
    line = result.stderr.splitlines()[-1]
    for figure in (
        "20 tokens (length)",
        "prefill",
        "decode",
        "tok/s",
        "first token after",
        "peak memory",
        "context 512 = ",
        "KV",
    ):
        assert figure in line
    assert (saved["completion_tokens"], saved["finish_reason"]) == (20, "length")
    assert saved["prompt_tokens"] > 3
    assert saved["prefill_tok_s"] > 0
    assert saved["decode_tok_s"] > 0
    assert 0.3 < saved["ttft_s"] < took + 0.05  # from the start of the process: importing torch is in it
    assert saved["peak_rss_bytes"] > 50_000_000
    settings = saved["settings"]
    assert (settings["context"], settings["threads"], settings["precision"], settings["max_tokens"]) == (
        512,
        1,
        "bf16",
        20,
    )
    assert (
        settings["kv_bytes"] == 512 * 2 * 2 * 16 * 2
    )  # one full layer, keys and values, 2 heads of 16, 2 bytes


def test_the_first_token_comes_soon(tiny_model: Path, tmp_path: Path) -> None:
    """Under 4 s on a machine of its own; where others compute too, by what importing torch alone takes then."""
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    torch_s = time.monotonic() - began
    path = tmp_path / "run.json"
    assert huorn("run", PROMPT, "--model", tiny_model, "--max-tokens", "2", "--json", path).code == 0
    assert json.loads(path.read_text())["ttft_s"] < max(4.0, 3 * torch_s)


def test_light_imports(tiny_model: Path) -> None:
    """--help and bad options do without torch; a run does without transformers."""
    show = (
        "import sys; print([m for m in ('torch', 'transformers', 'numpy', 'tokenizers') if m in sys.modules])"
    )
    program = f"""
import atexit, sys
atexit.register(lambda: exec({show!r}))
from huorn.cli import main
sys.argv = ["huorn", *sys.argv[1:]]
main()
"""

    def loaded(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=300
        )
        return done.stdout.splitlines()[-1]

    assert loaded("--help") == "[]"
    assert loaded("run", "--top-k", "many", "x") == "[]"
    assert "transformers" not in loaded("run", "x", "--model", str(tiny_model), "--max-tokens", "1")


def test_stdin_is_read_unchanged(call: Caller, tiny_model: Path, tmp_path: Path) -> None:
    text = "Zürich 東京\n\n"
    options = ("--model", tiny_model, "--max-tokens", "8", "--json")
    from_stdin = call("run", "-", *options, tmp_path / "a.json", stdin=text.encode())
    from_argument = call("run", text, *options, tmp_path / "b.json")
    assert from_stdin.stdout == from_argument.stdout
    a, b = (json.loads((tmp_path / name).read_text()) for name in ("a.json", "b.json"))
    assert a["prompt_tokens"] == b["prompt_tokens"]


def test_the_seed_in_the_json_file_gives_the_text_again(
    call: Caller, tiny_model: Path, tmp_path: Path
) -> None:
    options = ("--model", tiny_model, "--max-tokens", "16", "--temperature", "1.2", "--top-p", "0.95")
    first = call("run", PROMPT, *options, "--json", tmp_path / "run.json")
    seed = json.loads((tmp_path / "run.json").read_text())["settings"]["seed"]
    assert call("run", PROMPT, *options, "--seed", str(seed)).stdout == first.stdout
    assert len({call("run", PROMPT, *options, "--seed", str(s)).stdout for s in range(3)}) > 1


def test_stop_strings_from_the_command_line(call: Caller, tiny_model: Path) -> None:
    options = ("--model", tiny_model, "--max-tokens", "30")
    text = call("run", PROMPT, *options).stdout
    stop = text[4:7]
    result = call("run", PROMPT, *options, "--stop", "never", "--stop", stop)
    assert result.stdout == text[: text.find(stop)]
    assert "(stop)" in result.stderr


def test_both_streams_in_one_pipe_end_with_the_figures(tiny_model: Path) -> None:
    done = subprocess.run(
        [*COMMAND, "run", PROMPT, "--model", str(tiny_model), "--max-tokens", "5"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=300,
    )  # fmt: skip
    assert done.stdout.decode().splitlines()[-1].startswith("5 tokens")


def test_utf8_comes_out_whatever_the_locale(tiny_model: Path) -> None:
    env = {"LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    options = ("run", "東京", "--model", tiny_model, "--max-tokens", "20")
    result = huorn(*options, env=env)
    assert result.code == 0, result.stderr
    assert result.stdout == huorn(*options).stdout


def test_a_reader_that_leaves_ends_it_quietly(tiny_model: Path) -> None:
    process = subprocess.Popen(
        [*COMMAND, "run", PROMPT, "--model", str(tiny_model), "--max-tokens", "1900", "--context", "2048"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stderr is not None
    assert os.read(process.stdout.fileno(), 10)
    process.stdout.close()
    errors = process.stderr.read().decode()
    process.stderr.close()
    assert process.wait(timeout=300) == 1
    assert errors == ""


def test_ctrl_c_ends_it_without_a_traceback(tiny_model: Path) -> None:
    process = subprocess.Popen(
        [*COMMAND, "run", PROMPT, "--model", str(tiny_model), "--max-tokens", "1900", "--context", "2048"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    assert os.read(process.stdout.fileno(), 10)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 130
    assert errors.strip() == b""


def test_a_full_disk_and_closed_streams(tiny_model: Path) -> None:
    command = shlex.join([*COMMAND, "run", PROMPT, "--model", str(tiny_model), "--max-tokens", "3"])
    for redirection, code, words in (
        (">/dev/full", 2, "error: stdout can not be written: No space left on device\n"),
        (">&-", 0, "3 tokens"),
        ("<&-", 2, "the prompt is empty"),
        ("2>&-", 0, ""),
        ("2>/dev/full", 2, ""),
    ):
        with_prompt = command if redirection != "<&-" else command.replace(shlex.quote(PROMPT), "-")
        done = subprocess.run(
            f"{with_prompt} {redirection}", shell=True, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == code, done
        assert words in done.stderr
        assert "Traceback" not in done.stderr
        assert "Exception ignored" not in done.stderr


@pytest.mark.parametrize("tokens", ["0", "1"])
def test_few_tokens(call: Caller, tiny_model: Path, tokens: str) -> None:
    result = call("run", PROMPT, "--model", tiny_model, "--max-tokens", tokens)
    assert result.code == 0
    assert f"{tokens} tokens (length)" in result.stderr
