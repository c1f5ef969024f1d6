"""Slots: rooms for experts in the fast tier, and the table through which kernels see only those that are ready."""

from __future__ import annotations

import ctypes
import threading
from enum import IntEnum

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from huorn.experts.store import PAGE, ExpertStore
from huorn.kernels.huge_pages import HugePages

_MADV_POPULATE_WRITE = 23  # Linux; Python's mmap module has no name for it
_POPULATE_STEP = 2 << 20


class SlotState(IntEnum):
    """What a slot holds: nothing, an expert that is being copied, or one that kernels may read."""

    EMPTY = 0
    LOADING = 1
    READY = 2


class Slots:
    """`count` slots of store.slot_bytes each. One thread writes; kernels read `table` between its calls.

    `table` i64 [layers, experts, 6] has the addresses of an expert (gate, up, down, then scales) while its slot is READY and
    zeros otherwise, so weights and scales can not be indexed apart and no kernel finds a slot that is not READY.
    """

    def __init__(self, store: ExpertStore, count: int) -> None:
        """Takes the memory of all slots; populate() has its pages come. OSError when the system does not give it."""
        config = store.checkpoint.config
        self.count = count
        self._store = store
        self._memory = HugePages(count * store.slot_bytes).take(count * store.slot_bytes)
        self.table = torch.zeros(config.num_hidden_layers, config.num_experts, 6, dtype=torch.int64)
        self._rows = self.table.view(
            -1, 6
        ).numpy()  # of the same memory: a row is written in 3 us instead of 100
        self._place: dict[int, int] = {}  # key -> slot
        self._states = [SlotState.EMPTY] * count
        self._free = list(range(count - 1, -1, -1))

    def populate(self) -> None:
        """Has the pages of all slots come in the background, those first that are filled first."""
        _populate(self._memory)

    @property
    def free(self) -> int:
        """Slots that are EMPTY."""
        return len(self._free)

    def state(self, key: int) -> SlotState:
        """LOADING or READY for an expert that has a slot, EMPTY for one that has none."""
        place = self._place.get(key)
        return SlotState.EMPTY if place is None else self._states[place]

    @property
    def ready_mask(self) -> NDArray[np.bool_]:
        """[layers, experts]: which are READY."""
        mask: NDArray[np.bool_] = self._rows[:, 0].reshape(self.table.shape[:2]) != 0
        return mask

    def loading(self) -> list[int]:
        """Keys of experts that are LOADING."""
        return [key for key, place in self._place.items() if self._states[place] is SlotState.LOADING]

    def address(self, key: int) -> int:
        """Where the slot of an expert begins; a multiple of PAGE."""
        return self._memory.data_ptr() + self._place[key] * self._store.slot_bytes

    def load(self, key: int) -> int:
        """Gives an EMPTY slot to an expert, now LOADING; returns where it begins. One must be free."""
        assert key not in self._place
        place = self._free.pop()
        self._place[key], self._states[place] = place, SlotState.LOADING
        return self.address(key)

    def ready(self, key: int) -> None:
        """All bytes of a LOADING expert are there: kernels may read it from now on."""
        place = self._place[key]
        assert self._states[place] is SlotState.LOADING
        self._states[place] = SlotState.READY
        self._rows[key] = self._store.addresses(key, self.address(key))

    def clear(self, key: int) -> None:
        """Takes the slot of an expert that no copy writes to any more."""
        self._rows[key] = 0  # first: kernels must not find what is about to be overwritten
        place = self._place.pop(key)
        self._states[place] = SlotState.EMPTY
        self._free.append(place)


def _populate(memory: Tensor) -> None:
    """Has the system give all pages now, in a thread of its own and without changing them, so that a copy never waits for a page
    to be cleared: 14 GB take 15 s here, whatever the number of threads, three times as long as loading what every token needs.
    Where the system can not (before Linux 5.14) pages come as they are first written."""
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    size, start = memory.numel(), -(-memory.data_ptr() // PAGE) * PAGE

    def populate() -> None:
        for offset in range(0, size - PAGE, _POPULATE_STEP):
            libc.madvise(
                start + offset, min(_POPULATE_STEP, (size - offset) // PAGE * PAGE), _MADV_POPULATE_WRITE
            )
        assert memory.numel() == size  # alive until here

    threading.Thread(target=populate, name="populate slots", daemon=True).start()
