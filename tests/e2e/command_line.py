"""Runs the command line: in this process where possible (`import torch` takes 1.5 s), in one of its own where it matters."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

COMMAND = [sys.executable, "-m", "huorn.cli"]


class Result(NamedTuple):
    code: int
    stdout: str
    stderr: str


def huorn(*arguments: str | Path, stdin: bytes = b"", env: dict[str, str] | None = None) -> Result:
    """Run in a process of its own, with pipes."""
    done = subprocess.run(
        [*COMMAND, *map(str, arguments)],
        input=stdin,
        capture_output=True,
        timeout=300,
        env={**os.environ, **(env or {})},
    )
    return Result(done.returncode, done.stdout.decode(), done.stderr.decode())


class Caller:
    """Run `main` in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch = monkeypatch
        self._capsys = capsys

    def __call__(self, *arguments: str | Path, stdin: bytes = b"") -> Result:
        from huorn.cli import main

        self._monkeypatch.setattr(sys, "argv", ["huorn", *map(str, arguments)])
        self._monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"))
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = self._capsys.readouterr()
        return Result(int(ended.value.code or 0), out, err)


def assert_one_sentence(result: Result, *words: str) -> None:
    """Exit code 2, nothing on stdout, and one line `error: ...` that has these words."""
    assert result.code == 2, result
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1, result.stderr
    for word in words:
        assert word in result.stderr
