"""Native readers for tests, idle and busy ones."""

from __future__ import annotations

import os
import time
from pathlib import Path

from huorn._native import Reader
from huorn.experts.reader import Completion, ReaderLike

from .memory import BLOCK, Piece, Room, room_for

SIZES = (300_001, 5_000)  # of the two files of the fixture `files`; neither ends with a block
MIB = 1 << 20


def open_reader(engine: str, direct: bool, *paths: Path, lanes: int = 2, stripe_bytes: int = BLOCK) -> Reader:
    reader = Reader(lanes, stripe_bytes, direct, engine == "io_uring")
    assert reader.engine == engine
    assert [reader.add_file(str(path)) for path in paths] == list(range(len(paths)))
    return reader


def landed(reader: ReaderLike) -> list[Completion]:
    """All completions, in the order they came."""
    completions = []
    while reader.in_flight:
        got = reader.wait(30.0)
        assert got, "nothing landed within 30 s"
        completions += got
    return completions


def bytes_of(path: Path, piece: Piece) -> bytes:
    return path.read_bytes()[piece.offset : piece.offset + piece.nbytes]


def many_small(reader: Reader, count: int, demand: bool, nbytes: int = 64 << 10) -> Room:
    """Copies 0 to count - 1 of the same bytes, enough of them to keep one lane busy for a while."""
    room = Room(count * nbytes)
    for key in range(count):
        reader.submit(key, [(0, 0, nbytes, room.address + key * nbytes)], demand)
    return room


def busy_reader(folder: Path, engine: str) -> tuple[Reader, Room]:
    """One lane in the middle of copy 0, a prefetch of 128 MiB in 16 stripes."""
    path, nbytes = folder / "sparse", 128 * MIB
    path.touch()
    os.truncate(path, nbytes)
    reader, room = open_reader(engine, False, path, lanes=1), Room(nbytes)
    reader.submit(0, [(0, 0, nbytes, room.address)], False)
    while reader.bytes_read == 0:
        time.sleep(0)
    return reader, room


def one_error(reader: Reader, piece: Piece) -> tuple[int, int, int]:
    """Error, file and offset of a copy of this piece."""
    room = room_for([piece])
    reader.submit(3, room.place([piece]), True)
    [(key, error, file, offset)] = landed(reader)
    assert key == 3
    return error, file, offset
