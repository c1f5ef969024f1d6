"""The native reader: bytes of files land where they belong, on both engines, with O_DIRECT and through the page cache."""

from __future__ import annotations

import errno
import os
import random
import signal
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from huorn._native import Reader

from .memory import BLOCK, Piece, Room, room_for
from .native import MIB, SIZES, busy_reader, bytes_of, landed, many_small, open_reader


@st.composite
def pieces_of_files(draw: st.DrawFn) -> list[Piece]:
    """1 to 5 pieces of a byte to the whole file, often at a block boundary or at the end of the file."""
    pieces = []
    for _ in range(draw(st.integers(1, 5))):
        file = draw(st.integers(0, len(SIZES) - 1))
        size = SIZES[file]
        begin, end = sorted(draw(st.tuples(*[st.integers(0, size)] * 2)))
        if draw(st.booleans()):
            begin = begin // BLOCK * BLOCK
        if draw(st.booleans()):
            end = size if draw(st.booleans()) else max(begin, end // BLOCK * BLOCK)
        if begin == end:
            begin, end = (begin, begin + 1) if begin < size else (begin - 1, begin)
        pieces.append(Piece(file, begin, end - begin))
    return pieces


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    pieces=pieces_of_files(),
    lanes=st.integers(1, 4),
    stripe_bytes=st.sampled_from([1, BLOCK, 3 * BLOCK, 1 << 16]),
)
def test_any_pieces_land_and_nothing_else_is_touched(
    files: list[Path], engine: str, direct: bool, pieces: list[Piece], lanes: int, stripe_bytes: int
) -> None:
    reader = open_reader(engine, direct, *files, lanes=lanes, stripe_bytes=stripe_bytes)
    room = room_for(pieces, gap=1)
    segments = room.place(pieces, gap=1)
    reader.submit(7, segments, True)
    assert landed(reader) == [(7, 0, pieces[0].file, pieces[0].offset)]
    written = bytearray(room.nbytes)
    for piece, (_, _, nbytes, address) in zip(pieces, segments, strict=True):
        assert room.read(address, nbytes) == bytes_of(files[piece.file], piece)
        first, last = (address - room.address) // BLOCK, (address - room.address + nbytes - 1) // BLOCK
        written[first * BLOCK : (last + 1) * BLOCK] = b"\1" * ((last - first + 1) * BLOCK)
    everything = room.read(room.address, room.nbytes)
    assert all(everything[at] == 0xA5 for at in range(0, room.nbytes, 97) if not written[at])
    assert everything.count(0xA5) >= written.count(0)


@pytest.mark.parametrize("stripe_bytes", [BLOCK, 1 << 16, MIB])
def test_neighbours_share_blocks_in_any_order(
    files: list[Path], engine: str, direct: bool, stripe_bytes: int
) -> None:
    reader = open_reader(engine, direct, *files, stripe_bytes=stripe_bytes)
    room, cuts = Room(SIZES[0] + BLOCK), [100, 4095, 4096, 5000, 5001, 90_000, 299_999, SIZES[0]]
    segments = [(0, a, b - a, room.address + a) for a, b in pairwise(cuts)]
    random.Random(1).shuffle(segments)
    reader.submit(0, segments, True)
    assert landed(reader) == [(0, 0, 0, segments[0][1])]
    assert room.read(room.address + 100, SIZES[0] - 100) == files[0].read_bytes()[100:]
    # Once each: not a block more than the file has.
    assert reader.bytes_read == (SIZES[0] if reader.direct(0) else SIZES[0] - 100)


def test_a_large_copy_reads_each_block_once(tmp_path: Path, engine: str, direct: bool) -> None:
    path = tmp_path / "large"
    path.write_bytes(random.Random(2).randbytes(5 * MIB))
    reader = open_reader(engine, direct, path, lanes=4, stripe_bytes=1 << 16)
    piece = Piece(0, 12_345, 4 * MIB)
    room = room_for([piece])
    segments = room.place([piece])
    reader.submit(-1, segments, False)
    assert landed(reader) == [(-1, 0, 0, piece.offset)]
    assert room.read(segments[0][3], piece.nbytes) == bytes_of(path, piece)
    assert reader.bytes_read == (4 * MIB + BLOCK if reader.direct(0) else 4 * MIB)


def test_direct_where_the_file_system_allows(files: list[Path]) -> None:
    try:
        os.close(os.open(files[0], os.O_RDONLY | os.O_DIRECT))
        allowed = True
    except OSError:
        allowed = False
    assert open_reader("threads", True, files[0]).direct(0) == allowed
    assert not open_reader("threads", False, files[0]).direct(0)
    # Files of /proc refuse O_DIRECT everywhere.
    assert not open_reader("threads", True, Path("/proc/self/maps")).direct(0)


# ---- order ----


def test_demand_overtakes_prefetches(files: list[Path], engine: str, direct: bool) -> None:
    reader, room = open_reader(engine, direct, *files, lanes=1), Room(3 * BLOCK)
    keep = many_small(reader, 400, demand=False)
    for key in (5001, 5000, 5002):
        reader.submit(key, [(1, 0, BLOCK, room.address + (key - 5000) * BLOCK)], True)
    order = [key for key, *_ in landed(reader)]
    assert sorted(order) == [*range(400), 5000, 5001, 5002]
    assert order.index(5002) < 350
    # First come, first served within a kind.
    assert [key for key in order if key >= 5000] == [5001, 5000, 5002]
    assert [key for key in order if key < 5000] == list(range(400))
    del keep


def test_demand_goes_between_the_stripes_of_a_prefetch(tmp_path: Path, engine: str) -> None:
    for _ in range(5):  # it may have landed before the other was submitted
        reader, room = busy_reader(tmp_path, engine)
        small = Room(BLOCK)
        reader.submit(1, [(0, 0, BLOCK, small.address)], True)
        order = [key for key, *_ in landed(reader)]
        if order == [1, 0]:
            break
    assert order == [1, 0]
    del room


def test_promote(files: list[Path], engine: str, direct: bool) -> None:
    reader = open_reader(engine, direct, *files, lanes=1)
    keep = many_small(reader, 400, demand=False)
    assert reader.promote(399)
    assert reader.promote(398)
    assert reader.promote(399)  # keeps its place
    assert not reader.promote(400)
    order = [key for key, *_ in landed(reader)]
    assert order.index(399) + 1 == order.index(398) < 350
    assert Counter(order) == Counter(range(400))
    assert not reader.promote(399)
    del keep


# ---- cancel ----


def test_cancel_before_it_starts(files: list[Path], engine: str, direct: bool) -> None:
    reader = open_reader(engine, direct, *files, lanes=1)
    keep = many_small(reader, 400, demand=False)
    cancelled = [key for key in range(399, 299, -1) if reader.cancel(key)]
    assert len(cancelled) == 100
    assert not reader.cancel(399)
    assert not reader.cancel(400)
    reader.submit(399, [(1, 0, BLOCK, keep.address + 399 * (64 << 10))], False)  # the key is free again
    assert sorted(key for key, error, *_ in landed(reader) if error == 0) == [*range(300), 399]
    assert keep.read(keep.address + 350 * (64 << 10), BLOCK) == b"\xa5" * BLOCK
    assert not reader.cancel(0)


def test_cancel_in_flight_drops_the_rest(tmp_path: Path, engine: str) -> None:
    for _ in range(5):  # it may have landed before it was cancelled
        reader, room = busy_reader(tmp_path, engine)
        assert not reader.cancel(0)
        completions = landed(reader)
        if completions[0][1] != 0:
            break
    assert completions == [(0, errno.ECANCELED, 0, 0)]
    assert reader.bytes_read < room.nbytes


def test_cancel_between_stripes(tmp_path: Path, files: list[Path], engine: str) -> None:
    for _ in range(5):
        reader, room = busy_reader(tmp_path, engine)
        other = Room(64 << 10)
        file = reader.add_file(str(files[0]))
        for key in range(1, 200):
            reader.submit(key, [(file, 0, 64 << 10, other.address)], True)
        while not reader.wait(1.0):  # the one lane reads demand now, copy 0 waits for its next stripe
            pass
        assert not reader.cancel(0)
        errors = {key: error for key, error, *_ in landed(reader)}
        if errors.get(0) == errno.ECANCELED:
            break
    assert errors[0] == errno.ECANCELED
    assert not any(error for key, error in errors.items() if key)
    del room


# ---- many, waiting, ending ----


def test_a_thousand_copies_complete_once_each(files: list[Path], engine: str, direct: bool) -> None:
    reader, numbers = open_reader(engine, direct, *files, lanes=4), random.Random(3)
    pieces = [Piece(0, numbers.randrange(280_000), numbers.randrange(1, 20_000)) for _ in range(1000)]
    room = room_for(pieces)
    segments = room.place(pieces)
    completions = []
    for key in range(1000):
        reader.submit(key, segments[key : key + 1], demand=key % 3 == 0)
        if key % 7 == 0:
            completions += reader.wait(0)
    completions += landed(reader)
    assert sorted(completions) == [(key, 0, 0, piece.offset) for key, piece in enumerate(pieces)]
    contents = files[0].read_bytes()
    for piece, (_, offset, nbytes, address) in zip(pieces, segments, strict=True):
        assert room.read(address, nbytes) == contents[offset : offset + piece.nbytes]


def test_the_end_of_a_reader_in_the_middle_of_copies(files: list[Path], engine: str, direct: bool) -> None:
    for wait in (0.0, 0.001, 0.01):
        reader = open_reader(engine, direct, *files, lanes=4)
        room = many_small(reader, 500, demand=False)
        time.sleep(wait)
        start = time.perf_counter()
        del reader
        assert time.perf_counter() - start < 5.0
        before = room.read(room.address, room.nbytes)
        time.sleep(0.02)
        assert room.read(room.address, room.nbytes) == before, "something was written after the end"


def test_idle_and_unused_readers_end_and_cost_nothing(engine: str) -> None:
    reader = open_reader(engine, True, lanes=8)
    start, cpu = time.perf_counter(), time.process_time()
    assert reader.wait(0.3) == []
    assert time.perf_counter() - start >= 0.3
    assert time.process_time() - cpu < 0.1
    for nothing in (0, 0.0, -1.0, float("nan")):
        assert reader.wait(nothing) == []
    del reader


def test_an_interrupt_gets_through(engine: str) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    reader, old = open_reader(engine, True), signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        start = time.perf_counter()
        with pytest.raises(KeyboardInterrupt):
            reader.wait(float("inf"))
        assert time.perf_counter() - start < 5.0
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)


def test_a_key_is_under_way_until_wait_returned_it(files: list[Path], engine: str) -> None:
    reader, room = open_reader(engine, True, *files), Room(BLOCK)
    segments = [(0, 0, BLOCK, room.address)]
    reader.submit(9, segments, True)
    time.sleep(0.05)  # it has landed by now, most likely
    with pytest.raises(ValueError, match="copy 9 is already under way"):
        reader.submit(9, segments, True)
    assert reader.in_flight == 1
    assert reader.promote(9)
    assert landed(reader) == [(9, 0, 0, 0)]
    reader.submit(9, segments, True)
    assert landed(reader) == [(9, 0, 0, 0)]


# ---- a part of the lanes for prefetches, and a slower link ----


def test_prefetches_have_a_part_of_the_lanes_and_all_land(tmp_path: Path, engine: str) -> None:
    """One lane of four for them; promoted ones get the others, in mid-copy too."""
    path, nbytes = tmp_path / "sparse", 4 * MIB
    path.touch()
    os.truncate(path, nbytes)
    for promoted in (False, True):
        reader, room = Reader(4, 64 << 10, False, engine == "io_uring", ahead_lanes=1), Room(3 * nbytes)
        reader.add_file(str(path))
        for key in range(3):
            reader.submit(key, [(0, 0, nbytes, room.address + key * nbytes)], False)
        if promoted:
            assert all(reader.promote(key) for key in range(3))
        assert sorted(landed(reader)) == [(key, 0, 0, 0) for key in range(3)]
        assert reader.busy_s > 0


def test_a_slower_link_takes_its_time_and_demand_overtakes(tmp_path: Path) -> None:
    path, nbytes = tmp_path / "sparse", MIB
    path.touch()
    os.truncate(path, nbytes)
    reader, room = Reader(4, 64 << 10, False, False, ahead_lanes=1, link_bytes_s=10e6), Room(2 * nbytes)
    reader.add_file(str(path))
    start = time.perf_counter()
    reader.submit(0, [(0, 0, nbytes, room.address)], False)
    time.sleep(0.01)
    reader.submit(1, [(0, 0, 128 << 10, room.address + nbytes)], True)
    assert [key for key, *_ in landed(reader)] == [1, 0]
    took = time.perf_counter() - start
    assert took >= (nbytes + (128 << 10)) / 10e6
    assert 0.9 * took - 0.01 < reader.busy_s < took
