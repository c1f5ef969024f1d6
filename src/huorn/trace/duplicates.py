"""Which prompts are duplicates of each other, exactly or nearly, so that none of them is trained on and another tested on."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np
from numpy.typing import NDArray

from huorn.trace.manifest import Duplicates, NearDuplicate

THRESHOLD = 0.5  # Jaccard: shared shingles over all shingles of two prompts


@dataclass(frozen=True)
class Grouped:
    """The group of each prompt, numbered by first appearance, and what was found."""

    groups: tuple[int, ...]
    duplicates: Duplicates


def group_duplicates(sha256s: Sequence[str], shingles: Sequence[NDArray[np.uint64]]) -> Grouped:
    """Groups prompts whose texts are equal, or whose shingles (ascending, each once) are alike by THRESHOLD or more.

    Every pair that is as alike ends in one group, directly or through others; no other does.

    Two sets that share half of what they have together share one of their rarest shingles, so an index of those finds every
    pair (prefix filtering, Bayardo, Ma and Srikant 2007). A prompt is compared with one of a group at a time and no more once it
    belongs to it, so a thousand copies of one text are a thousand comparisons. 20,000 prompts of 300 to 400 words take 4 s, and
    their shingles as long again, on one core.
    """
    joined = _Groups(len(sha256s))
    by_sha = defaultdict[str, list[int]](list)
    for prompt, sha256 in enumerate(sha256s):
        by_sha[sha256].append(prompt)
    exact = [tuple(same) for same in by_sha.values() if len(same) > 1]
    for same in exact:
        for prompt in same[1:]:
            joined.join(same[0], prompt)
    near = _near([same[0] for same in by_sha.values()], shingles, joined)
    numbers: dict[int, int] = {}
    groups = tuple(numbers.setdefault(joined.of(prompt), len(numbers)) for prompt in range(len(sha256s)))
    return Grouped(groups, Duplicates(exact=tuple(exact), near=tuple(near)))


def _near(
    prompts: Sequence[int], shingles: Sequence[NDArray[np.uint64]], joined: _Groups
) -> list[NearDuplicate]:
    """Joins the groups of alike prompts, and returns the pairs that did."""
    sets, single = _rare_first([shingles[prompt] for prompt in prompts])
    # For each shingle, the prompts that have it among their rarest, by the group that they were in then.
    index = defaultdict[int, dict[int, list[int]]](dict)
    found = list[NearDuplicate]()
    for here, own in enumerate(sets):
        prompt = prompts[here]
        rarest = own[: len(own) - ceil(THRESHOLD * len(own)) + 1]
        rare = rarest[rarest >= single].tolist()  # nobody else has the others
        compared = set[int]()
        for shingle in rare:
            for others in index[shingle].values():
                for there in others:
                    other = prompts[there]
                    if joined.of(other) == joined.of(prompt):
                        break
                    if there in compared:
                        continue
                    compared.add(there)
                    similarity = _jaccard(own, sets[there])
                    if similarity >= THRESHOLD:
                        joined.join(other, prompt)
                        found.append(
                            NearDuplicate(first=other, second=prompt, similarity=round(similarity, 4))
                        )
        for shingle in rare:
            index[shingle].setdefault(joined.of(prompt), []).append(here)
    return found


def _rare_first(sets: Sequence[NDArray[np.uint64]]) -> tuple[list[NDArray[np.int64]], int]:
    """The same sets of other numbers, the place of each shingle when all are sorted by the number of sets that have it; and how
    many are in one set only."""
    values, counts = np.unique(np.concatenate(sets), return_counts=True)
    places = np.empty(len(values), dtype=np.int64)
    places[np.argsort(counts, kind="stable")] = np.arange(len(values))
    numbered = [np.sort(places[np.searchsorted(values, each)]) for each in sets]
    return numbered, int(np.count_nonzero(counts == 1))


def _jaccard(one: NDArray[np.int64], other: NDArray[np.int64]) -> float:
    less, more = sorted((len(one), len(other)))
    if less < THRESHOLD * more:  # even if all of the smaller one were shared
        return less / more
    shared = len(np.intersect1d(one, other, assume_unique=True))
    return shared / (less + more - shared)


class _Groups:
    """Union-find; a group goes by its first member."""

    def __init__(self, count: int) -> None:
        self._parents = list(range(count))

    def of(self, member: int) -> int:
        while self._parents[member] != member:
            self._parents[member] = self._parents[self._parents[member]]
            member = self._parents[member]
        return member

    def join(self, one: int, other: int) -> None:
        first, second = sorted((self.of(one), self.of(other)))
        self._parents[second] = first
