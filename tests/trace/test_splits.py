"""Duplicates against all pairs in plain Python, splits against what they promise."""

from __future__ import annotations

import subprocess
import sys
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from huorn.errors import UsageError
from huorn.trace.duplicates import group_duplicates
from huorn.trace.shingles import id_shingles, text_shingles
from huorn.trace.splits import split_by_group, split_by_time


def components(count: int, pairs: list[tuple[int, int]]) -> list[int]:
    """The least member of everybody's component, by flooding."""
    least = list(range(count))
    for _ in range(count):
        for one, other in pairs:
            least[one] = least[other] = min(least[one], least[other])
    return least


SETS = st.lists(st.sets(st.integers(0, 14), min_size=1, max_size=9), min_size=1, max_size=14)


@settings(deadline=None, max_examples=500)
@given(sets=SETS, data=st.data())
def test_groups_are_the_components_of_alike_pairs(sets: list[set[int]], data: st.DataObject) -> None:
    copies = data.draw(st.lists(st.integers(0, len(sets) - 1), max_size=3))
    shas = [f"{number:02x}" for number in [*range(len(sets)), *copies]]
    sets = [*sets, *(sets[number] for number in copies)]
    alike = [
        (one, other)
        for one, other in combinations(range(len(sets)), 2)
        if shas[one] == shas[other] or 2 * len(sets[one] & sets[other]) >= len(sets[one] | sets[other])
    ]
    found = group_duplicates(shas, [np.array(sorted(each), dtype=np.uint64) for each in sets])
    wanted = components(len(sets), alike)
    for one, other in combinations(range(len(sets)), 2):
        assert (found.groups[one] == found.groups[other]) == (wanted[one] == wanted[other])
    for near in found.duplicates.near:
        first, second = sets[near.first], sets[near.second]
        assert near.similarity == round(len(first & second) / len(first | second), 4) >= 0.5
    links = [(near.first, near.second) for near in found.duplicates.near]
    links += [(same[0], other) for same in found.duplicates.exact for other in same[1:]]
    assert components(len(sets), links) == wanted  # what the manifest says explains every group


def test_shingles_of_words() -> None:
    text = "The quick brown fox jumps over the lazy dog, again."
    assert len(text_shingles(text)) == 3
    assert (
        text_shingles(text) == text_shingles("the QUICK brown fox -- jumps over\nthe lazy dog again")
    ).all()
    assert len(text_shingles("one two")) == 1
    assert text_shingles("one two")[0] != text_shingles("two one")[0]
    assert len(text_shingles("东京今天的天气非常好我们去公园")) == 15 - 8 + 1
    assert text_shingles("{}")[0] != text_shingles("[]")[0]
    assert len(id_shingles([1, 2, 3, 4, 5, 6])) == 2
    assert len(text_shingles("la " * 40)) == 1


def test_shingles_are_the_same_in_every_process() -> None:
    code = "from huorn.trace.shingles import text_shingles as f; print(f('a b c d e f g h i').tolist())"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONHASHSEED": "7"}
    )
    assert done.stdout.strip() == str(text_shingles("a b c d e f g h i").tolist())


GROUPS = st.lists(st.integers(0, 30), min_size=3, max_size=80)


@settings(deadline=None, max_examples=300)
@given(groups=GROUPS, seed=st.integers(0, 2**32 - 1))
def test_splits(groups: list[int], seed: int) -> None:
    generator = np.random.default_rng(seed)
    shas = [generator.bytes(32).hex() for _ in groups]
    different = len(set(groups))
    if different < 3:
        with pytest.raises(UsageError, match=f"the prompts are {different} group"):
            split_by_group(groups, shas)
        return
    splits = split_by_group(groups, shas)
    assert set(splits) == {"train", "validation", "test"}
    by_group = {
        group: {split for g, split in zip(groups, splits, strict=True) if g == group} for group in groups
    }
    assert all(len(found) == 1 for found in by_group.values()), "a group is in one split"
    least = {group: min(sha for g, sha in zip(groups, shas, strict=True) if g == group) for group in groups}
    order = [min(by_group[group]) for group in sorted(least, key=least.__getitem__)]
    ranks = [("train", "validation", "test").index(split) for split in order]
    assert ranks == sorted(ranks), "groups are cut in the order of their least SHA-256"
    largest = max(groups.count(group) for group in groups)
    if different > 30 or largest <= len(groups) / 20:
        share = splits.count("train") / len(groups)
        assert abs(share - 0.8) <= largest / len(groups) + 2 / len(groups)
    shuffled = generator.permutation(len(groups))
    again = split_by_group([groups[n] for n in shuffled], [shas[n] for n in shuffled])
    assert again == [splits[n] for n in shuffled], "the order in the file does not count"


def test_a_thousand_prompts_are_cut_at_80_and_90_percent() -> None:
    splits = split_by_group(range(1000), [f"{n:04d}" for n in range(1000)])
    assert splits == ["train"] * 800 + ["validation"] * 100 + ["test"] * 100


def test_by_time() -> None:
    assert split_by_time(20) == ["train"] * 16 + ["validation"] * 2 + ["test"] * 2
    assert split_by_time(3) == ["train", "validation", "test"]
    with pytest.raises(UsageError, match="2 decode steps are too few"):
        split_by_time(2)
