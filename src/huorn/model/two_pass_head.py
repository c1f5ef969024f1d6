"""lm_head in two passes: INT8 codes bound every logit, and only rows that can be among the wanted ones are multiplied in BF16.

native/coded_rows.h has the bound. The logits that come out are those of the full product, to the bit, since each has one order of
summation wherever its row lies; which rows are left out is decided by bounds that hold for what the kernels compute. So a token
picked greedily or among the k largest is the one that the full product would give. Activations stay BF16: rounded to INT8 as
well, one outlier among them would leave every row a candidate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from huorn import _native
from huorn.checkpoint.row_table import RowTable
from huorn.checkpoint.weight import Weight
from huorn.errors import CheckpointError
from huorn.kernels.operand import Operand
from huorn.model.head import Norm, product
from huorn.model.next_token import Adjustment, Candidates, NextToken
from huorn.model.tables import LmHead

# More rows than that are as quickly read as the whole matrix: in 4,096 runs, or one after the other.
MOST_CANDIDATES = 4096


@dataclass
class HeadCounts:
    """What a head has done so far: tokens asked for their largest logits, rows multiplied for them one by one, full products."""

    tokens: int = 0
    rescored_rows: int = 0
    full_products: int = 0

    @property
    def rescored_rows_per_token(self) -> float:
        """Mean over the tokens so far."""
        return self.rescored_rows / max(1, self.tokens)


@dataclass(eq=False)
class TwoPassHead:
    """The BF16 weights are in the file behind `table`, codes int8 [V, D], scale and spread f32 [V] in RAM."""

    table: RowTable
    norm: Norm
    codes: Tensor
    scale: Tensor
    spread: Tensor
    kind: LmHead = field(default="two-pass", init=False)
    counts: HeadCounts = field(default_factory=HeadCounts, init=False)

    @classmethod
    def build(cls, table: RowTable, norm: Norm, runtime: _native.Runtime, room: Tensor) -> TwoPassHead:
        """Makes the codes while the file is read, 8 MB at a time, into room uint8 [model.tables.coded_bytes].

        Raises CheckpointError when the weights can not be read, or hold NaN or infinity.
        """
        rows, cols = table.shape
        scale, spread = room[: 8 * rows].view(torch.float32).split(rows)
        codes = room[len(room) - rows * cols :].view(torch.int8).view(rows, cols)
        for first, piece in table.pieces():
            weights = _operand(piece).data
            places = [part[first:].data_ptr() for part in (codes, scale, spread)]
            if not runtime.code_rows(weights.data_ptr(), len(weights), cols, *places):
                raise CheckpointError(f"{table.name} holds NaN or infinity; the file is damaged")
        return cls(table, norm, codes, scale, spread)

    def full(self, runtime: _native.Runtime, x: Tensor, columns: int) -> Tensor:
        """As Head.full, with the weights read from the file once."""
        out = torch.empty(len(x), self.table.shape[0])
        for first, piece in self.table.pieces():
            part = torch.empty(len(x), len(piece))
            weights = _operand(piece)
            product(runtime, weights.matrix(), self.norm, x, columns, part)
            out[:, first : first + len(piece)] = part
        self.counts.full_products += 1
        return out

    def next_tokens(self, runtime: _native.Runtime, x: Tensor, columns: int) -> Sequence[NextToken]:
        """As Head.next_tokens: one pass over the codes for all of them."""
        batch = _Batch(self, runtime, x)
        return [_Token(batch, number) for number in range(len(x))]

    @cached_property
    def coded_rows(self) -> _native.CodedRows:
        """For a kernel call; valid as long as this head is."""
        rows, cols = self.table.shape
        # Sums are at most |x| |w|, and |w| is at most spread / (2^-24 cols): below 2^126 none overflows. Before the scale they
        # are at most 127 sqrt(cols) |x|.
        largest = min(2.0**100, 2.0**102 * cols / float(self.spread.max()))
        return _native.CodedRows(
            codes=self.codes.data_ptr(), scale=self.scale.data_ptr(), spread=self.spread.data_ptr(), rows=rows, cols=cols,
            largest_x=largest,
        )  # fmt: skip


@dataclass(eq=False)
class _Batch:
    """Hidden states x f32 [S, D] of sequences that were read together."""

    head: TwoPassHead
    runtime: _native.Runtime
    x: Tensor

    @cached_property
    def bounds(self) -> tuple[Tensor, Tensor]:
        """(lower, upper) f32 [S, V]; infinite where nothing is known."""
        head, shape = self.head, (len(self.x), self.head.table.shape[0])
        lower, upper = torch.empty(shape), torch.empty(shape)
        self.runtime.bound_rows(
            head.coded_rows, head.norm.scale.data_ptr(), head.norm.eps, self.x.data_ptr(), len(self.x), lower.data_ptr(),
            upper.data_ptr(),
        )  # fmt: skip
        return lower, upper


class _Token:
    """The next token of sequence `number` of a batch."""

    def __init__(self, batch: _Batch, number: int) -> None:
        self._batch = batch
        self._number = number
        self._x = batch.x[number : number + 1]

    def full(self) -> Tensor:
        """All logits."""
        return self._batch.head.full(self._batch.runtime, self._x, 1)[0]

    def largest(self, k: int, adjustment: Adjustment | None = None) -> Candidates:
        """Those that can be among the k largest; all where they are too many, as when the hidden state is damaged."""
        head = self._batch.head
        head.counts.tokens += 1
        ids = self._candidates(k, adjustment) if k <= MOST_CANDIDATES else None
        if ids is None:
            return Candidates(None, self.full())
        head.counts.rescored_rows += len(ids)
        logits = torch.empty(1, len(ids))
        weights = _operand(head.table.rows(ids))
        product(self._batch.runtime, weights.matrix(), head.norm, self._x, 1, logits)
        return Candidates(ids, logits[0])

    def _candidates(self, k: int, adjustment: Adjustment | None) -> Tensor | None:
        """Ids int64 [n], ascending; None where they are more than MOST_CANDIDATES."""
        lower, upper = (bound[self._number] for bound in self._batch.bounds)
        if adjustment is not None:
            lower = _adjusted(lower, adjustment, -np.inf)
            upper = _adjusted(upper, adjustment, np.inf)
        ids = torch.empty(MOST_CANDIDATES, dtype=torch.int64)
        rows = len(lower)
        found = _native.candidates(
            lower.data_ptr(), upper.data_ptr(), rows, min(k, rows), ids.data_ptr(), MOST_CANDIDATES
        )
        return ids[:found] if found <= MOST_CANDIDATES else None


def _adjusted(bound: Tensor, adjustment: Adjustment, outwards: float) -> Tensor:
    """A copy of bound f32 [V] with the adjusted ones moved to the next F32 outwards: adjusting is done in F64."""
    bound = bound.clone()
    ends = adjustment.of(bound[adjustment.ids].double(), adjustment.minus).float()
    bound[adjustment.ids] = torch.nextafter(ends, torch.tensor(outwards))
    return bound


def _operand(rows: Tensor) -> Operand:
    """Rows as stored, as the full product takes them: in BF16."""
    return Operand.of(Weight(rows), f32=False)
