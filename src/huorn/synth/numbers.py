"""Pseudo-random weight bytes at memory speed, the same on every machine.

A tensor of 35 GB worth of them must not cost more than its plain write, so no number is drawn per weight. One table of
draws is made per seed (0.4 s), each kind of tensor maps it to stored values once (a pool), and a tensor is a window of
its pool whose signs are flipped by a window of a second, shorter table: 8 GB/s on one core. Where a tensor's two windows
start comes from a hash of its name, so layer 3 is the same in a 4-layer and a 40-layer checkpoint. Both lengths are
prime: value and sign repeat together only after 7 x 10^13 weights, and the chance that two of 32,000 tensors start
at the same pair of places is 10^-5 (a test looks at all of them for seed 0).

Only integers are drawn (PCG64's raw stream, which NumPy promises to keep) and only correctly rounded operations follow.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

from huorn.checkpoint.fp8 import F8_MAX

Bytes = npt.NDArray[np.uint8]

LONG_POOL = 16_777_259  # the prime after 2^24
SHORT_POOL = 65_537  # prime; enough for tensors of at most as many elements, and quick to make
SIGN_POOL = 4_194_319  # the prime after 2^22
# A draw is the sum of four uniform bytes, 0 to 1020: close to a normal distribution cut off at 3.45 deviations.
DRAW_MEAN = 510
DRAW_STD = 147.80
# Of the stored E4M3 values: 129.8, so that the largest of a block is near 448.
CODE_STD = F8_MAX / DRAW_MEAN * DRAW_STD

_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn}


@dataclass(frozen=True)
class Values:
    """Distribution and storage of one kind of tensor: near-normal around `mean`, `dtype` as safetensors spells it.

    Signs are flipped only where the mean is 0. `long`: from the long table, for tensors of more than SHORT_POOL elements.
    """

    dtype: str
    std: float
    mean: float = 0.0
    long: bool = False

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return _DTYPES[self.dtype].itemsize


class NumberSource:
    """All numbers of one seed. Thread-safe after `prepare`; the pools of the 35B FP8 shape take about 200 MB."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._draws: dict[int, npt.NDArray[np.uint16]] = {}
        self._signs: dict[int, Bytes] = {}
        self._pools: dict[Values, Bytes] = {}

    def prepare(self, kinds: set[Values]) -> None:
        """Make the pools of these kinds, so that `fill` only reads."""
        for kind in kinds - self._pools.keys():
            length, itemsize = LONG_POOL if kind.long else SHORT_POOL, kind.itemsize
            if length not in self._draws:
                self._draws[length] = _draw(self._seed, length)
            if itemsize not in self._signs:
                self._signs[itemsize] = _sign_mask(self._seed, itemsize)
            self._pools[kind] = _stored_values(kind)[self._draws[length]].view(np.uint8)

    def fill(self, name: str, kind: Values, start: int, out: Bytes) -> None:
        """Write bytes [start, start + len(out)) of the tensor `name`, as stored in the file, into `out`."""
        pool, signs = self._pools[kind], self._signs[kind.itemsize] if kind.mean == 0.0 else None
        value_place, sign_place = (place * kind.itemsize + start for place in window_start(self._seed, name))
        done = 0
        while done < len(out):
            value = (value_place + done) % len(pool)
            count = min(len(out) - done, len(pool) - value)
            if signs is None:
                out[done : done + count] = pool[value : value + count]
            else:
                sign = (sign_place + done) % len(signs)
                count = min(count, len(signs) - sign)
                np.bitwise_xor(
                    pool[value : value + count], signs[sign : sign + count], out=out[done : done + count]
                )
            done += count


@lru_cache(maxsize=65_536)  # a tensor cut by a chunk boundary asks again
def window_start(seed: int, name: str) -> tuple[int, int]:
    """Elements at which the tensor's windows of its pool and of the signs start (before the remainder by their lengths)."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little") % LONG_POOL, int.from_bytes(digest[4:], "little") % SIGN_POOL


def _draw(seed: int, count: int) -> npt.NDArray[np.uint16]:
    """`count` sums of four bytes of PCG64's stream, uint16 [count]."""
    quads = _random_bytes([seed, 0], 4 * count).reshape(-1, 4)
    sums = quads[:, 0].astype(np.uint16)
    for column in (1, 2, 3):
        sums += quads[:, column]
    return sums


def _sign_mask(seed: int, itemsize: int) -> Bytes:
    """Bytes to XOR onto little-endian elements of `itemsize` bytes: the top bit of half of the elements."""
    mask = np.zeros((SIGN_POOL, itemsize), np.uint8)
    mask[:, -1] = _random_bytes([seed, itemsize], SIGN_POOL) & 0x80
    return mask.reshape(-1)


def _random_bytes(seed: list[int], count: int) -> Bytes:
    words = np.random.PCG64(seed).random_raw(-(-count // 8)).astype("<u8", copy=False)
    return words.view(np.uint8)[:count]


def _stored_values(kind: Values) -> npt.NDArray[np.unsignedinteger]:
    """The 1021 possible values of a kind as stored, little-endian [1021]: entry d is what a draw of d becomes."""
    distance = torch.arange(-DRAW_MEAN, DRAW_MEAN + 1, dtype=torch.float64)
    if kind.dtype == "F8_E4M3":
        # Half a step aside, so that no code is 0: one in 400 would be, and trained weights hold one code below the smallest
        # normal number in 15,000 (seedling), which is what kernels are made for. Signs are flipped later: the mean stays 0.
        distance += 0.5
    values = kind.mean + distance * (kind.std / DRAW_STD)
    stored = values.clamp(-F8_MAX, F8_MAX) if kind.dtype == "F8_E4M3" else values
    # Through F32 first, as torch converts: the same two correctly rounded steps everywhere.
    raw = stored.float().to(_DTYPES[kind.dtype]).view(torch.uint8).numpy()
    return raw.view(f"<u{kind.itemsize}")
