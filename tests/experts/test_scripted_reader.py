"""The scripted reader keeps the native one's contract, so that what passes on it can pass on the other."""

from __future__ import annotations

import errno
import random
from itertools import chain
from pathlib import Path

import pytest

from huorn._native import Reader
from huorn.experts.reader import CHANGED, TRUNCATED, ReaderLike

from .memory import BLOCK, Piece, Room, room_for
from .scripted_reader import ScriptedReader, all_at_once, all_reversed, shuffled

SIZE = 50_000
PIECES = [Piece(0, 10_000 * n + 17, 9_000) for n in range(4)]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(random.Random(0).randbytes(SIZE))
    return path


def submitted(reader: ReaderLike, file: Path, demands: tuple[int, ...] = (0, 1, 2, 3)) -> Room:
    """Copies 0 to 3 of PIECES under way."""
    number, room = reader.add_file(str(file)), room_for(PIECES)
    for key, segment in enumerate(room.place(PIECES)):
        assert segment[0] == number
        reader.submit(key, [segment], key in demands)
    return room


def content(room: Room, key: int) -> bytes:
    _, _, nbytes, address = room.place(PIECES)[key]
    return room.read(address, nbytes)


def wanted(file: Path, key: int) -> bytes:
    return file.read_bytes()[PIECES[key].offset :][: PIECES[key].nbytes]


def test_a_copy_is_nan_codes_until_it_lands(file: Path) -> None:
    reader = ScriptedReader()
    room = submitted(reader, file)
    assert all(content(room, key) == b"\xff" * 9_000 for key in range(4))
    for key in range(4):
        assert reader.in_flight == 4 - key
        assert reader.wait(1.0) == [(key, 0, 0, PIECES[key].offset)]
        assert [content(room, k) == wanted(file, k) for k in range(4)] == [k <= key for k in range(4)]
    assert reader.wait(1.0) == []


def landing(
    reader: ReaderLike, file: Path, demands: tuple[int, ...] = (0, 1, 2, 3), promote: int = 9
) -> list[list[int]]:
    """The keys of each `wait` until all have landed."""
    room, waits = submitted(reader, file, demands), []
    reader.promote(promote)
    while reader.in_flight:
        waits.append([key for key, *_ in reader.wait(0)])
    assert all(content(room, key) == wanted(file, key) for key in range(4))
    return waits


def test_order(file: Path) -> None:
    assert landing(ScriptedReader(), file) == [[0], [1], [2], [3]]
    assert landing(ScriptedReader(all_reversed), file) == [[3, 2, 1, 0]]
    assert landing(ScriptedReader(all_at_once), file, demands=(2, 3), promote=1) == [[2, 3, 1, 0]]
    seen = {tuple(chain(*landing(ScriptedReader(shuffled(seed)), file))) for seed in range(200)}
    assert len(seen) == 24


def test_delays(file: Path) -> None:
    assert landing(ScriptedReader(all_at_once, delays={0: 3, 3: 1}), file) == [[1, 2], [3], [], [0]]


@pytest.mark.parametrize("error", [errno.EIO, TRUNCATED, CHANGED])
def test_failures(file: Path, error: int) -> None:
    reader = ScriptedReader(all_at_once, errors={1: (error, 12_345)})
    room = submitted(reader, file)
    assert reader.wait(0)[1] == (1, error, 0, 12_345)
    assert content(room, 1) == b"\xff" * 9_000
    assert content(room, 2) == wanted(file, 2)
    assert reader.calls[-4:] == [("landed", 0), ("failed", 1), ("landed", 2), ("landed", 3)]


def test_cancel(file: Path) -> None:
    reader = ScriptedReader(all_at_once, started={1})
    room = submitted(reader, file)
    assert [reader.cancel(key) for key in (0, 1, 9)] == [True, False, False]
    assert reader.wait(0)[0] == (1, errno.ECANCELED, 0, PIECES[1].offset)
    assert [content(room, key) == wanted(file, key) for key in range(4)] == [False, False, True, True]


@pytest.mark.parametrize("kind", ["native", "scripted"])
def test_what_both_do(file: Path, kind: str) -> None:
    reader: ReaderLike = ScriptedReader() if kind == "scripted" else Reader(1, BLOCK, False, True)
    room = submitted(reader, file)
    number, landed = reader.add_file(str(file)), list[tuple[int, int, int, int]]()
    assert number == 1
    while reader.in_flight:
        landed += reader.wait(1.0)
    assert landed == [(key, 0, 0, PIECES[key].offset) for key in range(4)]
    assert reader.bytes_read == 4 * 9_000
    assert not reader.promote(0)
    assert not reader.cancel(0)
    for segments in ([], [(0, 1, 5, room.address)], [(0, 0, 0, room.address)], [(7, 0, 5, room.address)]):
        with pytest.raises(ValueError, match=r"."):
            reader.submit(0, segments, True)
    reader.submit(
        0, [(0, 0, 5, room.address), (0, SIZE - 5, 6, room.address + BLOCK + (SIZE - 5) % BLOCK)], True
    )
    with pytest.raises(ValueError, match="copy 0 is already under way"):
        reader.submit(0, [(0, 0, 5, room.address)], True)
    assert reader.wait(1.0) == [(0, TRUNCATED, 0, SIZE)]
    with pytest.raises(FileNotFoundError):
        reader.add_file(str(file) + "x")
    with pytest.raises(IsADirectoryError):
        reader.add_file(str(file.parent))
