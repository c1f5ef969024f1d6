"""Which part of a recording is trained on, which chooses settings, and which is only measured on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from huorn.errors import UsageError
from huorn.trace.manifest import SPLITS, Split

ENDS = (0.8, 0.9)  # of train and validation


def split_by_group(groups: Sequence[int], sha256s: Sequence[str]) -> list[Split]:
    """The split of each prompt: whole groups, in the order of their least SHA-256 (which knows nothing of what is in them), cut
    where 80 and 90 % of the prompts are nearest.

    Raises UsageError for fewer than three groups.
    """
    least: dict[int, str] = {}
    for group, sha256 in zip(groups, sha256s, strict=True):
        least[group] = min(sha256, least.get(group, sha256))
    order = sorted(least, key=lambda group: least[group])
    if len(order) < len(SPLITS):
        raise UsageError(
            f"the prompts are {len(order)} group{'s' if len(order) != 1 else ''} of duplicates, but train, validation and test "
            "need one each: give at least 3 prompts that are not alike"
        )
    places = {group: place for place, group in enumerate(order)}
    sizes = np.bincount([places[group] for group in groups], minlength=len(order))
    cuts = _cuts(sizes.tolist())
    return [_split(places[group], cuts) for group in groups]


def split_by_time(steps: int) -> list[Split]:
    """The split of each of `steps` consecutive steps: the first 80 % train, then 10 % and 10 %.

    Raises UsageError for fewer than three.
    """
    if steps < len(SPLITS):
        raise UsageError(
            f"{steps} decode steps are too few for train, validation and test: record at least 3"
        )
    cuts = _cuts([1] * steps)
    return [_split(step, cuts) for step in range(steps)]


def _cuts(sizes: Sequence[int]) -> tuple[int, int]:
    """(first item of validation, first of test) so that each split has one and the ends are nearest to ENDS."""
    before = np.concatenate([[0], np.cumsum(sizes)]) / sum(sizes)  # share of what lies before each item
    count = len(sizes)
    first = 1 + int(np.abs(before[1 : count - 1] - ENDS[0]).argmin())
    second = first + 1 + int(np.abs(before[first + 1 : count] - ENDS[1]).argmin())
    return first, second


def _split(place: int, cuts: tuple[int, int]) -> Split:
    return SPLITS[(place >= cuts[0]) + (place >= cuts[1])]
