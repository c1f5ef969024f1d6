"""The native scorer against float64, stage by stage, within the bound that rounding allows."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from huorn import _native
from huorn.errors import UsageError
from huorn.kernels import isa
from huorn.predictor.bank_files.int8_bank import GROUP
from huorn.predictor.native_scorer import NativeScorer

_UNIT = 2.0**-24  # of F32
_HALF_ULP = (
    2.0**-8
)  # rounding to BF16, with its 8 significant bits, moves a number by at most this share of it
_SILU_SLOPE = 1.1  # the steepest that silu is (1.0998, at 2.4)
_FLOOR = 1e-6  # silu by the kernels' own exponential, and denormals that count as zero


def check_native(coded: Mapping[str, Tensor], x: Tensor, base: Tensor) -> float:
    """Scores one set of inputs, x BF16 [H, F] and base [H, D], natively; the largest share of the bound that any number used.

    A product of K inputs rounds each term at most n = K / 128 + 10 times (native/predictor_bank.h), so before it is rounded to
    BF16 it is within g (sum |w x| + |bias|) of the exact one, g = n u / (1 - n u). Each stage is compared given what the one
    before handed over. UsageError when a number is outside.
    """
    scorer = NativeScorer(coded, _native.Runtime(1, isa.chosen()))
    z, _ = scorer.score(x, base)
    u, d, f = (part.double() for part in scorer.stages(len(x)))
    hidden, experts = base.shape[1], z.shape[2]
    worst = 0.0
    for head in range(len(x)):
        exact, error = _product(coded, "in", head, x[head].to(torch.bfloat16).double())
        want = exact / (1 + torch.exp(-exact))
        room = _SILU_SLOPE * (error + (exact.abs() + error) * _HALF_ULP)
        worst = max(worst, _share(u[head] - want, room + (want.abs() + room) * _HALF_ULP))
        exact, error = _product(coded, "out", head, u[head])
        room = error + (exact.abs() + error) * _HALF_ULP
        outputs = len(exact) - hidden
        worst = max(worst, _share(d[head] - exact[:outputs], room[:outputs]))
        forecast = base[head].to(torch.bfloat16).double() + exact[outputs:]
        room = room[outputs:]
        worst = max(worst, _share(f[head, :hidden] - forecast, room + (forecast.abs() + room) * _HALF_ULP))
        exact, error = _product(coded, "router", head, f[head])
        room = error + (exact.abs() + error) * _HALF_ULP
        want = d[head].view(-1, experts) + exact
        worst = max(worst, _share(z[head].double() - want, room + (want.abs() + room) * 2 * _UNIT))
    if worst > 1.0:
        raise UsageError(
            f"the native scorer of this machine ({isa.chosen()}) is {worst:.2f} times further from the int8 bank's scores than "
            "rounding allows: the bank is not to be used with it"
        )
    return worst


def _product(coded: Mapping[str, Tensor], name: str, head: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """Exact w x + bias in float64, [N], and how far an F32 sum of it may be off."""
    scale = coded[f"w_{name}.scale"][head].double()
    weight = coded[f"w_{name}.codes"][head].double() * scale.repeat_interleave(GROUP, 1)
    bias = coded[f"b_{name}"][head].double()
    x = torch.nn.functional.pad(x, (0, weight.shape[1] - len(x)))
    roundings = weight.shape[1] / GROUP + 10
    share = roundings * _UNIT / (1 - roundings * _UNIT)
    return weight @ x + bias, share * (weight.abs() @ x.abs() + bias.abs())


def _share(difference: Tensor, room: Tensor) -> float:
    return float((difference.abs() / (room + _FLOOR)).max())
