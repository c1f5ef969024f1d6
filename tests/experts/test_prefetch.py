"""What is to be copied ahead: against a plain loop, and the numbers that a user may write."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from huorn.errors import UsageError
from huorn.experts.ghost import GhostCache
from huorn.experts.policy import make_policy
from huorn.experts.prefetch import Brought, PrefetchRule, parse_caps
from huorn.trace.replay import replay
from huorn.trace.route_csv import LayerCall, RouteTrace

LAYERS, EXPERTS = 4, 6


@settings(max_examples=200)
@given(data=st.data())
def test_wanted_is_what_a_plain_loop_finds(data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 9999)))
    likely = (rng.permutation(LAYERS * EXPERTS).reshape(LAYERS, EXPERTS) / (LAYERS * EXPERTS)).astype(
        np.float32
    )
    without_head = data.draw(st.sets(st.integers(0, LAYERS - 1)))
    likely[list(without_head)] = np.nan
    there = rng.random((LAYERS, EXPERTS)) < data.draw(st.sampled_from([0.0, 0.5, 1.0]))
    caps = tuple(data.draw(st.integers(0, 4)) for _ in range(LAYERS))
    threshold, most = data.draw(st.sampled_from([0.0, 0.5, 0.9])), data.draw(st.integers(0, 12))
    chosen = []
    for layer in set(range(LAYERS)) - without_head:
        row = [(likely[layer, e], layer * EXPERTS + e) for e in range(EXPERTS) if not there[layer, e]]
        chosen += sorted((one for one in row if one[0] > threshold), reverse=True)[: caps[layer]]
    chosen = sorted(chosen, reverse=True)[:most]
    want = [key for _, key in sorted(chosen, key=lambda one: (one[1] // EXPERTS, -one[0]))]
    assert PrefetchRule(caps, threshold).wanted(likely, there, most) == want


def test_caps() -> None:
    assert parse_caps("3", 4, 0) == (3, 3, 3, 3)
    assert parse_caps("2,0", 12, 1) == (0, *[2] * 5, *[0] * 6)
    published = parse_caps("card", 40, 6)
    assert published == (*[0] * 6, *[2] * 25, *[3] * 9)
    for wrong in ("", "x", "-1", "1,", "1,-2", "2.5"):
        with pytest.raises(UsageError, match=r"--prefetch .* must be a number of copies per layer and token"):
            parse_caps(wrong, 4, 0)


def test_what_was_brought_keeps_its_place_until_its_layer_has_run() -> None:
    brought = Brought()
    for key in (12, 13, 14):
        brought.add(2, key)
    brought.add(3, 20)
    assert 13 in brought
    assert brought
    brought.discard(14)
    assert 14 not in brought
    assert brought.passed(1, {13}, set()) == set()
    assert brought.passed(2, {12, 15}, {12}) == {13}
    assert 13 not in brought
    assert brought.forget() == {20}
    assert not brought
    counts = brought.counts
    assert (counts.begun, counts.used, counts.late, counts.unused) == (4, 1, 1, 3)


@settings(max_examples=50)
@given(seed=st.integers(0, 9999), room=st.integers(3, 20))
def test_a_ghost_misses_what_the_policy_would(seed: int, room: int) -> None:
    rng = np.random.default_rng(seed)
    calls = [
        LayerCall(layer, rng.permutation(EXPERTS)[None, :3].astype(np.int32), True, 0, step)
        for step in range(30)
        for layer in range(LAYERS)
    ]
    ghost = GhostCache((LAYERS, EXPERTS), room, (), np.zeros((LAYERS, EXPERTS)))
    for call in calls:
        ghost.call(call.layer, call.ids)
    trace = RouteTrace("made", LAYERS, EXPERTS, 3, (1,) * LAYERS, tuple(calls))
    assert ghost.misses == replay(trace, make_policy("lfu", LAYERS, EXPERTS, room), room).misses
