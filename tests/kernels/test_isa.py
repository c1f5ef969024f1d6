"""Which variant runs: what HUORN_ISA forces, what this machine lacks, and the search for NaN codes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from huorn import _native
from huorn.errors import UsageError
from huorn.kernels import isa as variants


@pytest.fixture(params=variants.ALL)
def isa(request: pytest.FixtureRequest) -> str:
    if request.param not in variants.available():
        pytest.skip(f"this CPU has no {request.param}")
    return str(request.param)


def test_portable_always_runs_and_the_fastest_comes_last() -> None:
    have = variants.available()
    assert have[0] == "portable"
    assert have == [name for name in variants.ALL if name in have]


def test_the_fastest_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(variants.VARIABLE, raising=False)
    assert variants.chosen() == variants.available()[-1]
    monkeypatch.setenv(variants.VARIABLE, "")
    assert variants.chosen() == variants.available()[-1]


def test_the_variable_forces_one(monkeypatch: pytest.MonkeyPatch, isa: str) -> None:
    monkeypatch.setenv(variants.VARIABLE, isa)
    assert variants.chosen() == isa


def test_the_variable_forces_one_in_a_fresh_process(isa: str) -> None:
    program = "from huorn import _native; from huorn.kernels import isa; print(_native.Runtime(1, isa.chosen()).isa)"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {variants.VARIABLE: isa},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == isa


@pytest.mark.parametrize("name", ["sse9", "AVX2", " amx", "portable,avx2"])
def test_an_unknown_name_is_one_sentence(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(variants.VARIABLE, name)
    with pytest.raises(UsageError) as caught:
        variants.chosen()
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(f"HUORN_ISA is {name!r} ({name!r} is none of portable, avx2, avx512, amx)")
    assert message.endswith(f"but this machine runs {', '.join(variants.available())}")


def test_a_known_name_that_this_machine_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variants, "available", lambda: ["portable", "avx2"])
    monkeypatch.setenv(variants.VARIABLE, "amx")
    with pytest.raises(UsageError) as caught:
        variants.chosen()
    assert str(caught.value) == "HUORN_ISA is 'amx', but this machine runs portable, avx2"


@pytest.mark.parametrize("name", ["", "sse9", "AMX"])
def test_a_runtime_of_an_unknown_variant(name: str) -> None:
    with pytest.raises(ValueError, match="this CPU has no "):
        _native.Runtime(1, name)


@pytest.mark.parametrize("threads", [0, -1])
def test_a_runtime_without_threads(threads: int) -> None:
    with pytest.raises(ValueError, match="threads must be 1 or more"):
        _native.Runtime(threads, "portable")


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_runtime_says_what_it_is(isa: str, threads: int) -> None:
    runtime = _native.Runtime(threads, isa)
    assert (runtime.isa, runtime.threads, runtime.counters()) == (isa, threads, (0, 0))


# ---- NaN codes ----


def has_nan(codes: Tensor) -> bool:
    return _native.has_nan_code(codes.data_ptr(), codes.numel())


def is_nan(code: int) -> bool:
    return code in (0x7F, 0xFF)


@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 130])
def test_every_code_at_every_place(length: int) -> None:
    room = torch.full((length + 2,), 0x7F, dtype=torch.uint8)  # NaN just outside
    codes = room[1:-1].fill_(0)
    assert not has_nan(codes)
    for place in range(length):
        for code in range(256):
            codes[place] = code
            assert has_nan(codes) == is_nan(code), (place, code)
        codes[place] = 0x7E


@pytest.mark.parametrize("background", [0x00, 0x7E, 0x80, 0xFE, 0x6F, 0x8F])
def test_one_nan_in_a_long_run(background: int) -> None:
    codes = torch.full((100_003,), background, dtype=torch.uint8)
    assert not has_nan(codes)
    places = [*range(70), *range(4090, 4100), 50_001, *range(100_003 - 70, 100_003)]
    for place in places:
        for nan in (0x7F, 0xFF):
            codes[place] = nan
            assert has_nan(codes), place
        codes[place] = background
    assert not has_nan(codes)


def test_all_finite_codes_together_at_any_address() -> None:
    finite = torch.tensor([code for code in range(256) if not is_nan(code)] * 3, dtype=torch.uint8)
    for offset in range(16):
        room = torch.full((finite.numel() + 64,), 0xFF, dtype=torch.uint8)
        codes = room[offset : offset + finite.numel()]
        codes.copy_(finite)
        assert not has_nan(codes)


def test_no_codes_at_all() -> None:
    assert not has_nan(torch.empty(0, dtype=torch.uint8))
