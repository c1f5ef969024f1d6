"""Random banks, and where every number of a head must lie: float64 with an interval for what F32 sums may round.

Intervals [low, high] go through the roundings to BF16 and the sums one after the other. Rounding is monotonic, so a computed
number whose sum is in an interval before the rounding is in the rounded interval behind it, whichever way ties fell.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad, silu

from huorn.predictor.bank_files import int8_bank

UNIT = 2.0**-24
TINY = 2.0**-120  # more than flushing the denormals of a whole sum can change
# A sigmoid below 2^-126, v < -87.3, counts as zero; |v| sigmoid(v) is less than that there, and falls.
LOST_SILU = 88 * 2.0**-126
LOWEST_SILU = -1.2784645427610738, -0.27846454276107384  # where silu turns, and its value there


class Interval(NamedTuple):
    """Ends float64 of the same shape."""

    low: Tensor
    high: Tensor

    @classmethod
    def at(cls, x: Tensor) -> Interval:
        return cls(x.double(), x.double())

    def holds(self, x: Tensor) -> bool:
        return bool(((self.low <= x.double()) & (x.double() <= self.high)).all())

    def wider(self, by: Tensor | float) -> Interval:
        return Interval(self.low - by, self.high + by)

    def plus(self, other: Interval) -> Interval:
        return Interval(self.low + other.low, self.high + other.high)

    def to(self, dtype: torch.dtype) -> Interval:
        """Rounded, through F32 as the numbers themselves."""
        return Interval(*(end.float().to(dtype).double() for end in self))


@dataclass(frozen=True)
class Sizes:
    heads: int = 3
    features: int = 200
    width: int = 128
    hidden: int = 72
    experts: int = 64
    groups: int = 3


RAGGED = (
    Sizes(),
    Sizes(heads=2, features=128, width=256, hidden=128, experts=16),
    Sizes(heads=1, features=1, width=128, hidden=1, experts=1, groups=1),
    Sizes(heads=5, features=385, width=128, hidden=257, experts=33, groups=2),
    Sizes(heads=2, features=1000, width=384, hidden=300, experts=130, groups=3),
)
LARGE = Sizes(
    heads=2, features=7489, width=128, hidden=2048, experts=256
)  # one head of the 35B shape is 1.9 MB


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape) + seed))


def random_bank(sizes: Sizes) -> dict[str, Tensor]:
    """Normal weights, quantised; numbers of the usual size at every stage."""
    outputs = sizes.groups * sizes.experts + sizes.hidden
    tensors = {
        "a": 1.0 + normal(sizes.heads, sizes.groups).abs(),
        "b": normal(sizes.heads, sizes.groups, seed=1),
    }
    for seed, (name, rows, cols) in enumerate(
        (
            ("in", sizes.width, sizes.features),
            ("out", outputs, sizes.width),
            ("router", sizes.experts, sizes.hidden),
        )
    ):
        weight = 2 * normal(sizes.heads, rows, cols, seed=seed) / math.sqrt(cols)
        tensors[f"w_{name}.codes"], tensors[f"w_{name}.scale"] = int8_bank.quantise(weight)
        tensors[f"b_{name}"] = normal(sizes.heads, rows, seed=seed)
    return tensors


def inputs(sizes: Sizes) -> tuple[Tensor, Tensor]:
    """x [H, F] and base [H, D], BF16; some features far larger than the others."""
    x = normal(sizes.heads, sizes.features)
    x[:, ::50] *= 100
    return x.bfloat16(), normal(sizes.heads, sizes.hidden).bfloat16()


def product(tensors: dict[str, Tensor], head: int, name: str, x: Interval, roundings: int) -> Interval:
    """bf16(w x + b) of any x in the interval [K], with sums whose terms go through Kp / 128 + `roundings` F32 roundings.

    So they are within g (sum |scale code x| + |bias|) of the exact ones, g = n u / (1 - n u), u = 2^-24.
    """
    codes, scale = (tensors[f"w_{name}.{part}"][head].double() for part in ("codes", "scale"))
    bias = tensors[f"b_{name}"][head].double()
    weight = codes * scale.repeat_interleave(128, 1)
    n = codes.shape[1] / 128 + roundings
    middle, half = (x.low + x.high) / 2, (x.high - x.low) / 2
    middle, half = (pad(part, (0, codes.shape[1] - len(part))) for part in (middle, half))
    reach = weight.abs() @ half
    error = n * UNIT / (1 - n * UNIT) * (weight.abs() @ (middle.abs() + half) + bias.abs())
    exact = weight @ middle + bias
    # 2^-50: float64's own roundings in these lines, per term
    return (
        Interval(exact, exact)
        .wider(reach + error * (1 + 2.0**-20) + 2.0**-40 * error + TINY)
        .to(torch.bfloat16)
    )


def trunk(before: Interval) -> Interval:
    """bf16(silu(v)); silu in F32 is right within 5e-7 of its value."""
    ends = torch.stack([silu(before.low), silu(before.high)])
    turns = (before.low < LOWEST_SILU[0]) & (LOWEST_SILU[0] < before.high)
    low = torch.where(turns, LOWEST_SILU[1], ends.amin(0))
    high = ends.amax(0)
    return Interval(low - 5e-7 * low.abs() - LOST_SILU, high + 5e-7 * high.abs() + LOST_SILU).to(
        torch.bfloat16
    )


def forecast(change: Interval, base: Tensor) -> Interval:
    """bf16(base + o), the sum of two BF16 numbers rounded to F32 first."""
    return change.plus(Interval.at(base)).to(torch.bfloat16)


def scores(corrections: Interval, router: Interval) -> Interval:
    """F32 sums, [G, E] of corrections [G, E] and router [E]."""
    return corrections.plus(router).to(torch.float32)


def whole_head(
    tensors: dict[str, Tensor], head: int, x: Tensor, base: Tensor, sizes: Sizes, roundings: int
) -> Interval:
    """Scores [G, E] from x [F] and base [D], every stage's interval going into the next."""
    u = trunk(product(tensors, head, "in", Interval.at(x), roundings))
    o = product(tensors, head, "out", u, roundings)
    split = sizes.groups * sizes.experts
    d = Interval(*(end[:split].view(sizes.groups, sizes.experts) for end in o))
    f = forecast(Interval(*(end[split:] for end in o)), base)
    return scores(d, product(tensors, head, "router", f, roundings))


def probabilities_are_right(tensors: dict[str, Tensor], z: Tensor, p: Tensor, first: int = 0) -> bool:
    """p f32 [H, G, E] = sigmoid(a z + b) of the z that came out: t = a z + b is rounded twice, and 1 / (1 + e^-t) is within 4e-7
    of its value; 2e-38 for the end of the exponential's range."""
    a, b = (tensors[name][first : first + len(z), :, None].double() for name in ("a", "b"))
    t = a * z.double() + b
    exact = torch.sigmoid(t)
    slip = 2.01 * UNIT * ((a * z.double()).abs() + b.abs())
    return bool(((p.double() - exact).abs() <= exact * (4e-7 + (1 - exact) * 1.01 * slip) + 2e-38).all())
