"""`huorn chat` from a pipe and at a terminal."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import time
from pathlib import Path

import pytest

from .command_line import COMMAND, Caller, assert_one_sentence, huorn


def test_lines_from_a_pipe(tiny_model: Path, tmp_path: Path) -> None:
    saved, report = tmp_path / "chat.json", tmp_path / "report.json"
    lines = f"hello\n\nand in Zürich?\n/save {saved}\n/reset\nhello\n/quit\nnever read\n"
    result = huorn(
        "chat", "--model", tiny_model, "--system", "Be brief.", "--max-tokens", "10", "--seed", "3", "--json", report,
        stdin=lines.encode(),
    )  # fmt: skip
    assert result.code == 0, result.stderr
    messages = json.loads(saved.read_text())
    assert [m["role"] for m in messages] == ["system", "user", "assistant", "user", "assistant"]
    assert messages[3]["content"] == "and in Zürich?"
    turns = json.loads(report.read_text())["turns"]
    assert [turn["prompt"] for turn in turns] == ["hello", "and in Zürich?", "hello"]
    assert turns[2]["text"] == turns[0]["text"] == messages[2]["content"]
    assert turns[1]["reused_tokens"] > 10
    assert result.stdout == "".join(turn["text"] + "\n" * (not turn["text"].endswith("\n")) for turn in turns)
    assert "context 2048 = " in result.stderr.splitlines()[0]


def test_end_of_input_ends_it(call: Caller, tiny_model: Path) -> None:
    assert call("chat", "--model", tiny_model).code == 0
    without_newline = call("chat", "--model", tiny_model, "--max-tokens", "3", stdin=b"hello")
    assert without_newline.code == 0
    assert without_newline.stdout != ""


def test_unknown_commands_are_answered(call: Caller, tiny_model: Path) -> None:
    result = call("chat", "--model", tiny_model, stdin=b"/dance\n/quit now\n/save\n/quit\n")
    assert result.code == 0
    assert result.stdout == ""
    for answer in (
        "there is no command '/dance'",
        "there is no command '/quit now'",
        "/save needs the name of a file",
    ):
        assert answer in result.stderr


def test_a_saved_chat_goes_on(call: Caller, tiny_model: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "1.json", tmp_path / "2.json"
    options = ("chat", "--model", tiny_model, "--max-tokens", "6", "--temperature", "0")
    together = call(*options, stdin=f"one\ntwo\n/save {first}\n".encode())
    call(*options, stdin=f"one\n/save {second}\n".encode())
    apart = call(*options, "--load", second, stdin=b"two\n")
    assert together.code == apart.code == 0
    assert json.loads(first.read_text())[-1]["content"] in apart.stdout
    assert_one_sentence(call(*options, "--load", tmp_path / "none"), "none can not be read")


def test_mistakes_in_a_pipe_end_it(call: Caller, tiny_model: Path, tmp_path: Path) -> None:
    for data, words in (
        (b"\xff\n", "line 1 of stdin is not UTF-8: byte 0 is 0xff"),
        (b"long " * 3000 + b"\n", "leaves no room"),
        (f"/save {tmp_path / 'none' / 'x'}\n".encode(), "can not be written"),
    ):
        result = call("chat", "--model", tiny_model, stdin=data)
        assert result.code == 2
        assert result.stderr.splitlines()[-1].startswith("error: ")
        assert words in result.stderr.splitlines()[-1]


class Terminal:
    """A chat on a pseudo-terminal."""

    def __init__(self, *options: str) -> None:
        self._master, slave = pty.openpty()
        env = {**os.environ, "TERM": "dumb"}
        self.process = subprocess.Popen(
            [*COMMAND, "chat", *options],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=env,
            start_new_session=True,
        )
        os.close(slave)
        self._seen = ""

    def type(self, text: str) -> None:
        self.type_bytes(text.encode())

    def type_bytes(self, data: bytes) -> None:
        os.write(self._master, data)

    def wait_for(self, text: str, timeout_s: float = 120) -> str:
        """Read until `text` is on the screen and return what came before it."""
        deadline = time.monotonic() + timeout_s
        while text not in self._seen:
            assert self._read(deadline), f"{text!r} never came: {self._seen!r}"
        before, _, self._seen = self._seen.partition(text)
        return before

    def wait_for_output(self) -> None:
        """Read until there is anything after what was waited for last."""
        if not self._seen:
            assert self._read(time.monotonic() + 120), "nothing came"

    def interrupt_until(self, text: str) -> None:
        """Ctrl-C at the prompt, once a second until it is seen.

        readline loses one that arrives between its prompt and its wait for a key (1 in 2,000 on an idle machine, sent at the
        sight of the prompt); whoever sits there presses again.
        """
        for _ in range(60):
            self.process.send_signal(signal.SIGINT)
            deadline = time.monotonic() + 1
            while text not in self._seen:
                if not self._read(deadline):
                    break
            else:
                self.wait_for(text)
                return
        pytest.fail(f"{text!r} never came: {self._seen!r}")

    def _read(self, deadline: float) -> bool:
        """Take what is there, waiting for it until `deadline`; False where nothing came or the other side is closed."""
        ready, _, _ = select.select([self._master], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            return False
        try:
            self._seen += os.read(self._master, 4096).decode(errors="replace")
        except OSError:
            return False
        return True

    def end(self) -> int:
        try:
            return self.process.wait(timeout=120)
        finally:
            self.process.kill()
            os.close(self._master)


def test_a_line_that_is_no_utf8_does_not_end_a_chat_at_a_terminal(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "utf-8:strict")  # as in a locale of UTF-8 other than C.UTF-8
    terminal = Terminal("--model", str(tiny_model))
    terminal.wait_for("> ")
    terminal.type_bytes(b"ab\xffcd\n")
    terminal.wait_for("error: the line is not UTF-8: byte 2 is 0xff")
    terminal.wait_for("> ")
    terminal.type("/quit\n")
    assert terminal.end() == 0


def test_ctrl_c_stops_the_answer_only(tiny_model: Path) -> None:
    # Greedy with a reward for repeating: the model writes its first token up to the limit, for seconds on any machine.
    terminal = Terminal(
        "--model", str(tiny_model), "--max-tokens", "1900", "--temperature", "0", "--frequency-penalty=-100",
        "--context", "2048",
    )  # fmt: skip
    terminal.wait_for("> ")
    terminal.type("tell me everything\n")
    terminal.wait_for("everything\r\n")
    terminal.wait_for_output()
    terminal.process.send_signal(signal.SIGINT)
    line = terminal.wait_for("peak memory")
    assert "tokens (cancelled)" in line
    terminal.wait_for("> ")
    terminal.interrupt_until("/quit or Ctrl-D ends the chat")
    terminal.wait_for(
        "> "
    )  # what is typed before it goes through the line discipline of the kernel, Ctrl-D is lost there
    terminal.type("/save /proc/nothing\n")
    terminal.wait_for("error: /proc/nothing can not be written")
    terminal.wait_for("> ")
    terminal.type("\x04")
    assert terminal.end() == 0
