"""What the native reader says of files that changed, ended or broke, of wrong calls, and of systems without io_uring."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from huorn._native import Reader
from huorn.experts.reader import CHANGED, TRUNCATED, read_error

from .memory import BLOCK, Piece, Room, room_for
from .native import MIB, SIZES, busy_reader, bytes_of, landed, one_error, open_reader

# ---- files that are not what they were ----


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
    reader = open_reader(engine, direct, path, lanes=1)
    assert one_error(reader, Piece(0, 10, 60_000)) == (0, 0, 10)
    if change == "longer":
        os.truncate(path, SIZES[0] + 1)
        os.utime(path, (1, 1))
    elif change == "rewritten":
        path.write_bytes(bytes(SIZES[0]))
    else:
        os.utime(path, (1, 2))
    before = reader.bytes_read
    assert one_error(reader, Piece(0, 10, 60_000)) == (CHANGED, 0, 10)
    assert reader.bytes_read == before  # noticed before anything was read


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
