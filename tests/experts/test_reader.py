"""The native reader: bytes of files land where they belong, on both engines, with O_DIRECT and through the page cache."""

from __future__ import annotations

import errno
import os
import random
import signal
import stat
import subprocess
import sys
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from huorn._native import Reader
from huorn.experts.reader import CHANGED, TRUNCATED, Completion, ReaderLike, read_error

from .memory import BLOCK, Piece, Room, room_for

SIZES = (300_001, 5_000)  # two files, neither ends with a block
MIB = 1 << 20


@pytest.fixture(params=["io_uring", "threads"])
def engine(request: pytest.FixtureRequest) -> str:
    if request.param == "io_uring" and Reader(1, BLOCK, False, True).engine != "io_uring":
        pytest.skip("this system has no io_uring")
    return str(request.param)


@pytest.fixture(params=["direct", "buffered"])
def direct(request: pytest.FixtureRequest) -> bool:
    return bool(request.param == "direct")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder, contents = tmp_path_factory.mktemp("files"), random.Random(0)
    paths = [folder / f"{size}.bin" for size in SIZES]
    for path, size in zip(paths, SIZES, strict=True):
        path.write_bytes(contents.randbytes(size))
    return paths


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


def many_small(reader: Reader, count: int, demand: bool, nbytes: int = 64 << 10) -> Room:
    """Copies 0 to count - 1 of the same bytes, enough of them to keep one lane busy for a while."""
    room = Room(count * nbytes)
    for key in range(count):
        reader.submit(key, [(0, 0, nbytes, room.address + key * nbytes)], demand)
    return room


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


# ---- files that are not what they were ----


def one_error(reader: Reader, piece: Piece) -> tuple[int, int, int]:
    """Error, file and offset of a copy of this piece."""
    room = room_for([piece])
    reader.submit(3, room.place([piece]), True)
    [(key, error, file, offset)] = landed(reader)
    assert key == 3
    return error, file, offset


def copy_of(path: Path, folder: Path) -> Path:
    target = folder / path.name
    target.write_bytes(path.read_bytes())
    return target


def test_a_file_too_short_from_the_start(files: list[Path], engine: str, direct: bool) -> None:
    reader = open_reader(engine, direct, *files)
    assert one_error(reader, Piece(1, 4_000, 1_001)) == (TRUNCATED, 1, SIZES[1])
    assert one_error(reader, Piece(0, 290_000, 50_000)) == (TRUNCATED, 0, SIZES[0])
    assert one_error(reader, Piece(1, 9_000, 1)) == (TRUNCATED, 1, SIZES[1])
    assert one_error(reader, Piece(1, 4_000, 1_000)) == (0, 1, 4_000)


def test_a_file_that_ends_with_a_block(tmp_path: Path, engine: str, direct: bool) -> None:
    path = tmp_path / "blocks"
    path.write_bytes(bytes(2 * BLOCK))
    reader = open_reader(engine, direct, path)
    assert one_error(reader, Piece(0, 100, 2 * BLOCK)) == (TRUNCATED, 0, 2 * BLOCK)
    assert one_error(reader, Piece(0, 100, 2 * BLOCK - 100)) == (0, 0, 100)


def test_truncated_while_open(tmp_path: Path, files: list[Path], engine: str, direct: bool) -> None:
    path = copy_of(files[0], tmp_path)
    reader = open_reader(engine, direct, path)
    os.truncate(path, 200_000)
    assert one_error(reader, Piece(0, 150_000, 60_000)) == (TRUNCATED, 0, 200_000)
    assert one_error(reader, Piece(0, 150_000, 1_000)) == (CHANGED, 0, 150_000)


@pytest.mark.parametrize("change", ["longer", "rewritten", "touched"])
def test_changed_while_open(
    tmp_path: Path, files: list[Path], engine: str, direct: bool, change: str
) -> None:
    path = copy_of(files[0], tmp_path)
    os.utime(path, (1, 1))
    reader = open_reader(engine, direct, path)
    assert one_error(reader, Piece(0, 10, 60_000)) == (0, 0, 10)
    if change == "longer":
        os.truncate(path, SIZES[0] + 1)
        os.utime(path, (1, 1))
    elif change == "rewritten":
        path.write_bytes(bytes(SIZES[0]))
    else:
        os.utime(path, (1, 2))
    assert one_error(reader, Piece(0, 10, 60_000)) == (CHANGED, 0, 10)


def test_changed_during_a_copy(tmp_path: Path, engine: str) -> None:
    for _ in range(5):  # it may have landed before the file was touched
        reader, room = busy_reader(tmp_path, engine)
        os.utime(tmp_path / "sparse", (1, 2))
        [(_, error, _, _)] = landed(reader)
        if error == CHANGED:
            break
    assert error == CHANGED
    assert reader.bytes_read == room.nbytes  # noticed at the end


def test_removed_or_replaced_files_are_read_on(
    tmp_path: Path, files: list[Path], engine: str, direct: bool
) -> None:
    path, piece = copy_of(files[0], tmp_path), Piece(0, 1_234, 200_000)
    reader, room = open_reader(engine, direct, path), room_for([piece])
    (tmp_path / "new").write_bytes(b"new")
    for replace in (True, False):
        if replace:
            os.replace(tmp_path / "new", path)
        else:
            path.unlink()
        segments = room.place([piece])
        reader.submit(0, segments, True)
        assert landed(reader) == [(0, 0, 0, piece.offset)]
        assert room.read(segments[0][3], piece.nbytes) == bytes_of(files[0], piece)


# ---- errors ----


def test_files_that_can_not_be_opened(tmp_path: Path, engine: str, direct: bool) -> None:
    reader = open_reader(engine, direct)
    os.mkfifo(tmp_path / "pipe")
    for name, kind in (
        ("absent", FileNotFoundError),
        (".", IsADirectoryError),
        ("absent/x", FileNotFoundError),
        ("pipe", OSError),
    ):
        with pytest.raises(kind) as caught:
            reader.add_file(str(tmp_path / name))
        assert caught.value.filename == str(tmp_path / name)
        assert caught.value.errno
    with pytest.raises(ValueError, match="null"):
        reader.add_file("a\0b")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission(tmp_path: Path, engine: str) -> None:
    path = tmp_path / "closed"
    path.write_bytes(b"x")
    path.chmod(stat.S_IWUSR)
    with pytest.raises(PermissionError):
        open_reader(engine, True, path)


def test_a_name_that_is_no_text(tmp_path: Path, engine: str) -> None:
    path = tmp_path / os.fsdecode(b"\xff\xfe")
    path.write_bytes(b"abc")
    assert one_error(open_reader(engine, True, path), Piece(0, 0, 3)) == (0, 0, 0)


def test_errors_of_the_system(engine: str, files: list[Path]) -> None:
    # Reading one's own memory where nothing is mapped is EIO, as from a broken disk.
    reader = open_reader(engine, True, Path("/proc/self/mem"), *files)
    assert one_error(reader, Piece(0, 8 * BLOCK + 5, 100)) == (errno.EIO, 0, 8 * BLOCK + 5)
    reader.submit(0, [(1, 0, 10, BLOCK)], True)  # and writing there is EFAULT
    assert landed(reader) == [(0, errno.EFAULT, 1, 0)]
    assert one_error(reader, Piece(1, 5, 100)) == (0, 1, 5)


def test_an_error_drops_the_rest_of_the_copy(engine: str, files: list[Path]) -> None:
    reader, room = open_reader(engine, False, Path("/proc/self/mem"), files[0], lanes=1), Room(MIB)
    reader.submit(0, [(0, BLOCK, 10, room.address), (1, 0, 200_000, room.address + BLOCK)], True)
    assert landed(reader) == [(0, errno.EIO, 0, BLOCK)]
    assert reader.bytes_read == 0


def test_copies_that_break_the_rules(files: list[Path], engine: str) -> None:
    reader, room = open_reader(engine, True, *files), Room(MIB)
    at = room.address
    bad = {
        "differ modulo 4096": [(0, 1, 10, at)],
        "at least one byte": [(0, 0, 0, at)],
        "at least one segment": [],
        "no file has the number 2": [(2, 0, 10, at)],
        "no file has the number -1": [(-1, 0, 10, at)],
        "largest offset": [(0, 1 << 63, 10, at)],
        "no such address": [(0, 0, 10, 0)],
        "share the block": [(0, 0, 10, at), (1, 100, 10, at + 100)],
        "share the block of": [(0, 0, BLOCK + 1, at), (0, 0, BLOCK, at + BLOCK)],
    }
    for sentence, segments in bad.items():
        with pytest.raises(ValueError, match=sentence):
            reader.submit(0, segments, True)
    assert reader.in_flight == 0
    assert reader.wait(0) == []
    assert room.read(at, MIB) == b"\xa5" * MIB


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


@pytest.mark.parametrize(("lanes", "stripe_bytes"), [(0, BLOCK), (-1, BLOCK), (129, BLOCK), (1, 0), (1, -5)])
def test_a_reader_without_lanes_or_stripes(lanes: int, stripe_bytes: int) -> None:
    with pytest.raises(ValueError, match=r"lanes must be 1 to 128|stripe_bytes must be 1 or more"):
        Reader(lanes, stripe_bytes, True, True)


def test_sentences() -> None:
    path = Path("/m/a.safetensors")
    assert str(read_error(path, "layer 3, expert 5", errno.EIO, 77)) == (
        "/m/a.safetensors: layer 3, expert 5 can not be read at offset 77: Input/output error"
    )
    for error, word in ((TRUNCATED, "truncated"), (CHANGED, "changed")):
        sentence = str(read_error(path, "up_proj", error, 77))
        assert word in sentence
        assert all(part in sentence for part in ("/m/a.safetensors: ", "up_proj", "offset 77"))


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


# Forbids io_uring_setup (425 on every architecture) to itself, as containers do, then copies.
FORBIDDEN = """
import ctypes, struct, sys
from huorn._native import Reader
error, path = int(sys.argv[1]), sys.argv[2]
code = [(0x20, 0, 0, 0), (0x15, 0, 1, 425), (0x06, 0, 0, 0x50000 | error), (0x06, 0, 0, 0x7FFF0000)]
program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *one) for one in code))
libc = ctypes.CDLL(None, use_errno=True)
libc.prctl.argtypes = [ctypes.c_int] + [ctypes.c_ulong] * 4
filter = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(code), ctypes.addressof(program)))
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, ctypes.addressof(filter), 0, 0) == 0, ctypes.get_errno()
reader = Reader(2, 4096, True, True)
room = ctypes.create_string_buffer(12288)
start = -(-ctypes.addressof(room) // 4096) * 4096
reader.submit(1, [(reader.add_file(path), 0, 5000, start)], True)
assert reader.wait(30.0) == [(1, 0, 0, 0)]
assert ctypes.string_at(start, 5000) == open(path, "rb").read(5000)
print(reader.engine)
"""


@pytest.mark.parametrize("error", [errno.EPERM, errno.ENOSYS, errno.ENOMEM])
def test_threads_where_io_uring_is_forbidden(files: list[Path], error: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORBIDDEN, str(error), str(files[0])], capture_output=True, text=True
    )
    assert (done.stdout, done.stderr) == ("threads\n", "")
