"""The plan of one MoE layer call: in which order routed pairs run, made from expert ids alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

# Below this many tokens pairs run one by one as they come: with eight of 256 experts per token, two of three tokens share an
# expert once in a while, and a bucket saves less than packing costs.
BUCKET_TOKENS = 4


@dataclass(frozen=True, eq=False)
class Plan:
    """Routed pairs in running order, cut into chunks of one expert each.

    pairs int32 [P]: pair = token * K + rank. chunks int32 [n, 3]: (expert id, first place in pairs, count), count at most the
    columns of one pass over the expert's weights. Each pair is in exactly one chunk.
    """

    pairs: NDArray[np.int32]
    chunks: NDArray[np.int32]

    @classmethod
    def of(cls, ids: NDArray[np.int32], columns: int) -> Plan:
        """The plan for ids int32 [T, K]; `columns` is the most tokens per weight pass."""
        if ids.shape[0] < BUCKET_TOKENS:
            return cls.per_pair(ids)
        return cls.bucketed(ids, columns)

    @classmethod
    def per_pair(cls, ids: NDArray[np.int32]) -> Plan:
        """Every pair alone, in the order of tokens and ranks: nothing is sorted or packed."""
        pairs = np.arange(ids.size, dtype=np.int32)
        chunks = np.ones((ids.size, 3), dtype=np.int32)
        chunks[:, 0] = ids.ravel()
        chunks[:, 1] = pairs
        return cls(pairs, chunks)

    @classmethod
    def bucketed(cls, ids: NDArray[np.int32], columns: int) -> Plan:
        """Pairs by rising expert id (tokens in order within one), ceil(count / columns) chunks per active expert."""
        by_pair = ids.ravel()
        pairs = np.argsort(by_pair, kind="stable").astype(np.int32)
        counts = np.bincount(by_pair)
        active = np.flatnonzero(counts)
        counts = counts[active]
        offsets = np.concatenate(([0], np.cumsum(counts)[:-1]))
        passes = -(-counts // columns)
        owner = np.repeat(np.arange(active.size), passes)  # which active expert a chunk is of
        within = (np.arange(owner.size) - np.repeat(np.cumsum(passes) - passes, passes)) * columns
        chunks = np.stack(
            [active[owner], offsets[owner] + within, np.minimum(columns, counts[owner] - within)], axis=1
        )
        return cls(pairs, chunks.astype(np.int32))

    def only(self, experts: Sequence[int]) -> Plan:
        """The chunks of these experts; pairs stay as they are."""
        wanted = set(experts)  # 5 us for the eight pairs of a token, of which np.isin takes 130
        return Plan(self.pairs, self.chunks[[expert in wanted for expert in self.chunks[:, 0].tolist()]])

    @cached_property
    def addresses(self) -> tuple[int, int, int, int]:
        """(pairs, their number, chunks, their number) for a kernel call."""
        return self.pairs.ctypes.data, self.pairs.size, self.chunks.ctypes.data, len(self.chunks)
