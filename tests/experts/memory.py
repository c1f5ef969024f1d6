"""Memory for copies: pages of its own, filled, with addresses that fit file offsets."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from dataclasses import dataclass

BLOCK = 4096


@dataclass(frozen=True)
class Piece:
    """Bytes [offset, offset + nbytes) of file number `file`."""

    file: int
    offset: int
    nbytes: int


class Room:
    """`nbytes` of 0xA5 on page boundaries, at `address`."""

    def __init__(self, nbytes: int) -> None:
        self._pages = mmap.mmap(-1, -(-nbytes // BLOCK) * BLOCK, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.nbytes = len(self._pages)
        self._pages.write(b"\xa5" * self.nbytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._pages))

    def read(self, address: int, nbytes: int) -> bytes:
        start = address - self.address
        return self._pages[start : start + nbytes]

    def place(self, pieces: Sequence[Piece], gap: int = 0) -> list[tuple[int, int, int, int]]:
        """One segment per piece, one behind the other with `gap` untouched blocks around each."""
        segments, position = [], self.address + gap * BLOCK
        for piece in pieces:
            address = position + piece.offset % BLOCK
            segments.append((piece.file, piece.offset, piece.nbytes, address))
            position = -(-(address + piece.nbytes) // BLOCK) * BLOCK + gap * BLOCK
        assert position <= self.address + self.nbytes
        return segments


def room_for(pieces: Sequence[Piece], gap: int = 0) -> Room:
    """As much as `place` takes."""
    blocks = sum(-(-piece.nbytes // BLOCK) + 1 + gap for piece in pieces)
    return Room((blocks + gap) * BLOCK)
