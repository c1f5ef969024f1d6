"""`huorn bench kernels`: what can be seen without the minutes and gigabytes that it takes."""

from __future__ import annotations

import pytest

from huorn.bench.kernels import KernelSpeed
from huorn.commands.bench_kernels import show

from .command_line import Caller, assert_one_sentence


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    show([KernelSpeed("amx", "linear F8 [n, 2048], 1 columns", "GB/s", 12.0, 24.0)], 2)
    out = capsys.readouterr().out
    assert "amx, 2 threads; limits: 24.0 GB/s" in out
    assert "linear F8 [n, 2048], 1 columns" in out  # not taken for markup
    assert "12.0" in out
    assert "50 %" in out


def test_bad_use(call: Caller) -> None:
    assert_one_sentence(
        call("bench", "kernels", "--repeats", "0"), "--repeats is 0, but it must be 1 or more"
    )
    assert_one_sentence(call("bench", "kernels", "--threads", "0"), "--threads is 0")
