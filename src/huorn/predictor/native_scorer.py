"""A bank of expert predictors on the native kernels: all heads of a token in one call (native/predictor_bank.h)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from huorn import _native

GROUP = 128  # kBlock of native/shapes.h: inputs of a row that share one scale
_WEIGHTS = ("w_in.codes", "w_in.scale", "w_out.codes", "w_out.scale", "w_router.codes", "w_router.scale")


@dataclass(frozen=True)
class BankShape:
    """Sizes of a bank: H heads, columns Fp of the inputs, trunk width T, D hidden, E experts, G groups of outputs."""

    heads: int
    columns: int
    width: int
    hidden: int
    experts: int
    groups: int

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> BankShape:
        """From a, the biases and the columns of w_in."""
        heads, groups = tensors["a"].shape
        width, experts = tensors["b_in"].shape[1], tensors["b_router"].shape[1]
        hidden = tensors["b_out"].shape[1] - groups * experts
        return cls(heads, tensors["w_in.codes"].shape[2], width, hidden, experts, groups)

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """Rows and padded columns of the weights of a head, by name."""
        return {
            "in": (self.width, self.columns),
            "out": (self.groups * self.experts + self.hidden, self.width),
            "router": (self.experts, round_up(self.hidden)),
        }

    @property
    def work_bytes(self) -> int:
        """At most what scoring all heads takes besides: features in F32 and BF16, what the passes hand over, results."""
        outputs = self.groups * self.experts
        return self.heads * 4 * (3 * self.columns + self.width + 4 * outputs + 2 * round_up(self.hidden))

    @property
    def tensors(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Dtype and shape of every tensor of the bank."""
        table: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        for name, (rows, cols) in self.matrices.items():
            table[f"w_{name}.codes"] = torch.int8, (self.heads, rows, cols)
            table[f"w_{name}.scale"] = torch.float32, (self.heads, rows, cols // GROUP)
            table[f"b_{name}"] = torch.float32, (self.heads, rows)
        for name in ("a", "b"):
            table[name] = torch.float32, (self.heads, self.groups)
        return table


class NativeScorer:
    """A bank's tensors for the kernels. One call at a time."""

    def __init__(self, tensors: Mapping[str, Tensor], runtime: _native.Runtime) -> None:
        """Takes tensors as huorn.predictor.bank_files.int8_bank names them. They are used where they are, best on huge pages.

        ValueError, naming the tensor, when one is missing or has another shape or dtype than its neighbours ask for.
        """
        self.shape = _checked(tensors)
        self._runtime = runtime
        self._tensors = {name: tensors[name].detach().contiguous() for name in self.shape.tensors}
        self._bank = _native.PredictorBank(
            w_in=self._weight("in"), w_out=self._weight("out"), w_router=self._weight("router"),
            a=self._tensors["a"].data_ptr(), b=self._tensors["b"].data_ptr(), hidden=self.shape.hidden,
            experts=self.shape.experts, groups=self.shape.groups,
        )  # fmt: skip
        shape = self.shape
        self._parts = (shape.width, shape.groups * shape.experts, round_up(shape.hidden))
        self._work = torch.zeros(shape.heads * sum(self._parts))

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales of all heads: what scoring them all reads."""
        return sum(self._tensors[name].nbytes for name in _WEIGHTS)

    def score(self, x: Tensor, base: Tensor, first: int = 0) -> tuple[Tensor, Tensor]:
        """Scores and probabilities f32 [n, G, E] of heads first to first + n - 1, for x [n, F] and base [n, D] of those heads.

        x and base are of any float dtype and rounded to BF16. The bits of a head's numbers depend neither on the other heads
        of a call nor on the number of threads. ValueError when shapes do not fit the bank.
        """
        shape, count = self.shape, len(x)
        if x.dim() != 2 or round_up(x.shape[1]) != shape.columns or base.shape != (count, shape.hidden):
            raise ValueError(
                f"features {list(x.shape)} and hidden states {list(base.shape)} of n heads must be [n, {shape.columns}], or up "
                f"to 127 fewer, and [n, {shape.hidden}]"
            )
        if not 0 <= first <= first + count <= shape.heads:
            raise ValueError(
                f"heads {first} to {first + count - 1} are asked for and the bank has 0 to {shape.heads - 1}"
            )
        x, base = x.detach().bfloat16().contiguous(), base.detach().bfloat16().contiguous()
        scores, probabilities = torch.empty(2, count, shape.groups, shape.experts)
        self.score_into(x, base, first, scores, probabilities)
        return scores, probabilities

    def score_into(self, x: Tensor, base: Tensor, first: int, scores: Tensor, probabilities: Tensor) -> None:
        """`score` without checks, for x and base in BF16 and results that are there, all contiguous."""
        self._runtime.score_heads(
            self._bank, first, len(x), x.data_ptr(), x.shape[1], base.data_ptr(), self._work.data_ptr(), scores.data_ptr(),
            probabilities.data_ptr(),
        )  # fmt: skip

    def stages(self, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """What the passes of the last call, of `count` heads, handed over: trunk u [n, T], corrections d [n, G E] and forecast
        hidden states f [n, Dp] with zeros behind D. For tests. BF16 numbers in F32; valid until the next call."""
        parts = self._work[: count * sum(self._parts)].split([count * part for part in self._parts])
        trunk, corrections, forecast = (part.view(count, -1) for part in parts)
        return trunk, corrections, forecast

    def _weight(self, name: str) -> _native.GroupedCodes:
        rows, cols = self.shape.matrices[name]
        parts = (
            self._tensors[part].data_ptr() for part in (f"w_{name}.codes", f"w_{name}.scale", f"b_{name}")
        )
        codes, scale, bias = parts
        return _native.GroupedCodes(codes=codes, scale=scale, bias=bias, rows=rows, cols=cols)


def _checked(tensors: Mapping[str, Tensor]) -> BankShape:
    for name, dims in (("a", 2), ("b_in", 2), ("b_out", 2), ("b_router", 2), ("w_in.codes", 3)):
        if name not in tensors or tensors[name].dim() != dims:
            raise ValueError(f"{name} must be a tensor of {dims} dimensions")
    shape = BankShape.of(tensors)
    for what, size in (("columns of w_in", shape.columns), ("trunk width", shape.width)):
        if size < 1 or size % GROUP:
            raise ValueError(f"{size} {what}: must be a positive multiple of {GROUP}")
    if min(shape.hidden, shape.experts, shape.groups, shape.heads) < 1:
        raise ValueError(f"a bank needs heads, outputs, experts and a hidden state, not {shape}")
    for name, (dtype, wanted) in shape.tensors.items():
        found = tensors.get(name)
        if found is None or found.dtype != dtype or found.shape != wanted:
            is_what = "is missing" if found is None else f"is {found.dtype} {list(found.shape)}"
            raise ValueError(f"{name} {is_what} and must be {dtype} {list(wanted)}")
    return shape


def round_up(n: int) -> int:
    """To a multiple of GROUP."""
    return -(-n // GROUP) * GROUP
