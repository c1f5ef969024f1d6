"""Runtime.linear: against float64 on the same rounded operands, and the same bits for any columns, threads and addresses."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from huorn import _native
from huorn.kernels.isa import ALL, available
from huorn.kernels.operand import BF16, F8, F32

FORMATS = {"f8": F8, "bf16": BF16, "f32": F32}
SHAPES = (
    (1, 1), (33, 1), (1, 72), (97, 200), (64, 130), (200, 640), (70, 1365), (300, 2048), (130, 4096), (512, 512), (257, 385),
)  # fmt: skip
COUNTS = (1, 2, 3, 4, 7, 12, 15, 16, 17, 31, 32, 33, 48, 64, 65, 70)
DENORMALS = [*range(8), *range(0x80, 0x88)]
NORMALS = [code for code in range(256) if code & 0x78 and code & 0x7F != 0x7F]
NANS = (0x7F, 0xFF)


@pytest.fixture(scope="module", params=ALL)
def isa(request: pytest.FixtureRequest) -> str:
    if request.param not in available():
        pytest.skip(f"this CPU has no {request.param}")
    return str(request.param)


@pytest.fixture(scope="module")
def runtimes(isa: str) -> dict[int, _native.Runtime]:
    return {threads: _native.Runtime(threads, isa) for threads in (1, 2, 3)}


@dataclass(frozen=True)
class Weight:
    """A weight as bytes at any address, and the numbers it stands for in float64."""

    data: Tensor  # uint8, flat
    scale: Tensor | None
    shape: tuple[int, int]
    format: int
    exact: Tensor

    @classmethod
    def of_codes(cls, codes: Tensor, scale: Tensor | None) -> Weight:
        rows, cols = codes.shape
        exact = codes.view(torch.float8_e4m3fn).double()
        if scale is not None:
            spread = scale.double().repeat_interleave(128, 0).repeat_interleave(128, 1)
            exact = exact * spread[:rows, :cols]
        return cls(codes.flatten(), scale, (rows, cols), F8, exact)

    @classmethod
    def random(cls, shape: tuple[int, int], format: int, seed: int = 0) -> Weight:
        generator = torch.Generator().manual_seed(1000 * shape[0] + shape[1] + seed)
        rows, cols = shape
        if format == F8:
            codes = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
            codes[(codes & 0x7F) == 0x7F] = 3
            blocks = (-(-rows // 128), -(-cols // 128))
            return cls.of_codes(codes, torch.rand(blocks, generator=generator) + 0.5)
        numbers = torch.randn(shape, generator=generator).to(
            torch.bfloat16 if format == BF16 else torch.float32
        )
        return cls(numbers.view(torch.uint8).flatten(), None, shape, format, numbers.double())

    def moved(self, offset: int) -> Weight:
        """The same numbers `offset` bytes behind a 64-byte boundary."""
        room = torch.empty(self.data.numel() + 128, dtype=torch.uint8)
        start = -room.data_ptr() % 64 + offset
        room[start : start + self.data.numel()] = self.data
        return Weight(
            room[start : start + self.data.numel()], self.scale, self.shape, self.format, self.exact
        )

    def operand(self, x: Tensor) -> Tensor:
        """x f32 as the product sees it, float64."""
        return (x if self.format == F32 else x.bfloat16()).double()


def linear(
    runtime: _native.Runtime,
    weight: Weight,
    x: Tensor,
    columns: int,
    norm: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """f32 [T, rows] of x f32 [T, cols], `columns` tokens per pass."""
    rows, cols = weight.shape
    y = torch.full((x.shape[0], rows), torch.nan)
    scale = 0 if weight.scale is None else weight.scale.data_ptr()
    matrix = _native.Matrix(weight.data.data_ptr(), scale, rows, cols, weight.format)
    assert x.is_contiguous()
    runtime.linear(
        matrix, 0 if norm is None else norm.data_ptr(), eps, x.data_ptr(), x.shape[0], columns, y.data_ptr()
    )
    return y


def columns_of(count: int, cols: int, seed: int = 0) -> Tensor:
    return torch.randn(count, cols, generator=torch.Generator().manual_seed(count + cols + seed))


def relative_error(ours: Tensor, exact: Tensor) -> float:
    return float((ours.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape[0]}x{shape[1]}")
@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
class TestAnyShape:
    def test_error_against_float64(
        self, runtimes: dict[int, _native.Runtime], format: int, shape: tuple[int, int]
    ) -> None:
        weight, x = Weight.random(shape, format), columns_of(70, shape[1])
        exact = weight.operand(x) @ weight.exact.T
        for columns in (1, 16, 64, 70):
            assert relative_error(linear(runtimes[2], weight, x, columns), exact) <= 1e-5

    def test_bits_for_any_columns_and_threads(
        self, runtimes: dict[int, _native.Runtime], format: int, shape: tuple[int, int]
    ) -> None:
        weight, x = Weight.random(shape, format), columns_of(max(COUNTS), shape[1])
        alone = linear(runtimes[1], weight, x, 1)
        assert not alone.isnan().any()
        for count in COUNTS:
            few = x[-count:].contiguous()
            assert torch.equal(linear(runtimes[1], weight, few, count), alone[-count:]), count
            for threads in (2, 3):
                passes = linear(runtimes[threads], weight, x, count)
                assert torch.equal(passes, alone), (count, threads)

    def test_bits_at_any_address(
        self, runtimes: dict[int, _native.Runtime], format: int, shape: tuple[int, int]
    ) -> None:
        weight, x = Weight.random(shape, format), columns_of(33, shape[1])
        aligned = {columns: linear(runtimes[2], weight.moved(0), x, columns) for columns in (1, 33)}
        for offset in (1, 2, 3):
            for columns, expected in aligned.items():
                moved = linear(runtimes[2], weight.moved(offset), x, columns)
                assert torch.equal(moved, expected), (offset, columns)


# ---- the 254 finite E4M3 codes ----


def all_codes() -> Tensor:
    """uint8 [256, 256]: every finite code in every column of a row, so with any neighbours and in any lane."""
    rows = torch.arange(256)[:, None] + torch.arange(256)
    codes = (rows % 256).to(torch.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0
    return codes


@pytest.mark.parametrize(
    "scale",
    [None, torch.ones(2, 2), torch.tensor([[2.0**-6, 2.0**5], [0.5, 2.0**20]])],
    ids=["none", "one", "powers"],
)
@pytest.mark.parametrize("columns", [1, 2, 16, 40, 64, 100])
def test_every_code_is_exact(
    runtimes: dict[int, _native.Runtime], scale: Tensor | None, columns: int
) -> None:
    weight = Weight.of_codes(all_codes(), scale)
    ours = linear(runtimes[1], weight, torch.eye(256), columns)
    assert torch.equal(ours.double(), weight.exact.T)


@pytest.mark.parametrize("code", [code for code in range(256) if code not in NANS and code % 8 in (0, 1, 7)])
def test_one_code_alone(runtimes: dict[int, _native.Runtime], code: int) -> None:
    weight = Weight.of_codes(torch.full((1, 1), code, dtype=torch.uint8), torch.ones(1, 1))
    assert float(linear(runtimes[1], weight, torch.ones(1, 1), 1)) == float(weight.exact)


def codes_from(choices: Sequence[int], shape: tuple[int, int]) -> Tensor:
    generator = torch.Generator().manual_seed(len(choices))
    table = torch.tensor(choices, dtype=torch.uint8)
    return table[torch.randint(0, len(choices), shape, generator=generator)]


@pytest.mark.parametrize("shape", [(97, 200), (64, 1024), (33, 65)], ids=str)
@pytest.mark.parametrize(
    "kind", ["denormals", "one-denormal-per-block", "half", "zeros-and-normals", "largest"]
)
def test_denormal_codes(runtimes: dict[int, _native.Runtime], kind: str, shape: tuple[int, int]) -> None:
    rows, cols = shape
    codes = codes_from(NORMALS, shape)
    if kind == "denormals":
        codes = codes_from(DENORMALS, shape)
    elif kind == "one-denormal-per-block":
        codes[torch.arange(rows), torch.arange(rows) * 37 % cols] = codes_from(DENORMALS, (1, rows))[0]
    elif kind == "half":
        codes[:, ::2] = codes_from(DENORMALS, codes[:, ::2].shape)  # type: ignore[arg-type]
    elif kind == "zeros-and-normals":
        codes[:, 1::3] = 0
        codes[::2, ::3] = 0x80
    else:
        codes = codes_from([0x7E, 0xFE], shape)
    scale = (
        torch.rand(-(-rows // 128), -(-cols // 128), generator=torch.Generator().manual_seed(1)) * 1e-3 + 1e-4
    )
    weight, x = Weight.of_codes(codes, scale), columns_of(70, cols)
    exact, alone = weight.operand(x) @ weight.exact.T, linear(runtimes[1], weight, x, 1)
    assert relative_error(alone, exact) <= 1e-5
    for columns in (2, 16, 33, 64, 70):
        assert torch.equal(linear(runtimes[2], weight, x, columns), alone), columns


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_zero_weights(runtimes: dict[int, _native.Runtime], format: int) -> None:
    shape = (97, 200)
    scale = torch.ones(1, 2) if format == F8 else None
    bytes_each = {F8: 1, BF16: 2, F32: 4}[format]
    data = torch.zeros(shape[0] * shape[1] * bytes_each, dtype=torch.uint8)
    weight = Weight(data, scale, shape, format, torch.zeros(shape, dtype=torch.float64))
    for columns in (1, 33, 70):
        assert torch.equal(linear(runtimes[2], weight, columns_of(70, 200), columns), torch.zeros(70, 97))


# ---- operands ----


@pytest.mark.parametrize("columns", [1, 16, 65])
def test_activations_round_to_nearest_even(runtimes: dict[int, _native.Runtime], columns: int) -> None:
    bits = torch.randint(0, 1 << 16, (65, 130), generator=torch.Generator().manual_seed(5)) << 16
    bits += torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])[torch.arange(130) % 6]
    exponent = (bits >> 23) & 0xFF
    bits[(exponent < 2) | (exponent > 250)] = 0x3F808000  # neither denormal nor near infinity
    x = torch.where(bits >= 1 << 31, bits - (1 << 32), bits).int().view(torch.float32)
    eye = torch.eye(130).bfloat16()
    weight = Weight(eye.view(torch.uint8).flatten(), None, (130, 130), BF16, eye.double())
    assert torch.equal(linear(runtimes[2], weight, x, columns), x.bfloat16().float())


@pytest.mark.parametrize("eps", [1e-6, 0.3])
@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("shape", [(97, 200), (33, 1), (40, 2048), (257, 385)], ids=str)
def test_input_norm(
    runtimes: dict[int, _native.Runtime], shape: tuple[int, int], format: int, eps: float
) -> None:
    cols = shape[1]
    x = columns_of(40, cols) * torch.logspace(-4, 3, 40)[:, None]
    norm = 1 + 0.3 * torch.randn(cols, generator=torch.Generator().manual_seed(2))
    exact = x.double() * (x.double().square().mean(-1, keepdim=True) + eps).rsqrt() * norm

    eye = torch.eye(cols)
    reveals = Weight(eye.view(torch.uint8).flatten(), None, (cols, cols), F32, eye.double())
    normed = linear(runtimes[1], reveals, x, 40, norm, eps)  # what the product gets, to the bit
    assert float(((normed.double() - exact).norm(dim=1) / exact.norm(dim=1)).max()) <= 1e-6

    weight = Weight.random(shape, format)
    alone = linear(runtimes[1], weight, x, 1, norm, eps)
    assert relative_error(alone, weight.operand(normed) @ weight.exact.T) <= 1e-5
    for threads, columns in ((1, 40), (2, 7), (3, 16), (2, 64)):
        assert torch.equal(linear(runtimes[threads], weight, x, columns, norm, eps), alone), (
            threads,
            columns,
        )


# ---- memory ----

_BETWEEN_GUARDS = """
import ctypes, mmap, sys
from huorn import _native
libc = ctypes.CDLL(None, use_errno=True)
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
page = mmap.PAGESIZE
runtime = _native.Runtime(2, sys.argv[1])
for rows, cols in ((1, 1), (33, 1), (1, 72), (97, 200), (257, 385), (32, 128), (64, 640)):
    for size, format in ((1, 0), (2, 1), (4, 2)):
        count = rows * cols * size
        inside = -(-count // page) * page
        room = mmap.mmap(-1, inside + 2 * page)
        base = ctypes.addressof(ctypes.c_char.from_buffer(room))
        for guard in (base, base + page + inside):
            if libc.mprotect(guard, page, 0):
                raise OSError(ctypes.get_errno(), "mprotect")
        for start in (base + page, base + page + inside - count):
            for tokens in (1, 5, 70):
                x, y = (ctypes.c_float * (tokens * cols))(), (ctypes.c_float * (tokens * rows))()
                scale = (ctypes.c_float * 64)(*[1.0] * 64)
                matrix = _native.Matrix(start, ctypes.addressof(scale), rows, cols, format)
                runtime.linear(matrix, 0, 0.0, ctypes.addressof(x), tokens, tokens, ctypes.addressof(y))
print("whole")
"""


def test_nothing_outside_the_weights_is_read(isa: str) -> None:
    """Mapped files end where they end: between two pages that may not be touched."""
    done = subprocess.run([sys.executable, "-c", _BETWEEN_GUARDS, isa], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "whole\n"), done.stderr
