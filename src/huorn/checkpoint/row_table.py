"""One large matrix of a checkpoint whose rows stay in the file until they are asked for."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from huorn.checkpoint.safetensors_file import DTYPES, SafetensorsFile, TensorInfo, fresh_memory
from huorn.checkpoint.weight import is_finite
from huorn.errors import CheckpointError

PIECE_BYTES = 8 << 20


class RowTable:
    """A matrix [V, D] in F32 or BF16. Rows are read with pread: pages of a mapping would count as memory of the process."""

    def __init__(self, file: SafetensorsFile, info: TensorInfo) -> None:
        self._file = file
        self._info = info
        self.name = f"{info.file}: {info.name}"
        rows, columns = info.shape
        self.shape = rows, columns
        self._dtype = DTYPES[info.dtype]
        self._row_bytes = columns * self._dtype.itemsize

    def rows(self, ids: Tensor) -> Tensor:
        """Rows ids int64 [n] in any order -> [n, D] as stored.

        Raises CheckpointError when they can not be read, or hold NaN or infinity.
        """
        if bool((ids[1:] > ids[:-1]).all()):
            return self._ascending(ids)
        once, places = torch.unique(ids, return_inverse=True)
        return self._ascending(once)[places]

    def _ascending(self, ids: Tensor) -> Tensor:
        """Rows of ids that ascend, each once. Neighbours are one read."""
        numbers = ids.numpy()
        cuts = np.flatnonzero(np.diff(numbers) != 1) + 1
        runs = list(zip([0, *cuts.tolist()], [*cuts.tolist(), len(numbers)], strict=True))
        if len(runs) > 1:  # a queue for the disk, which one read after the other never has
            for begin, end in runs:
                self._file.read_ahead(self._start(int(numbers[begin])), (end - begin) * self._row_bytes)
        raw = fresh_memory(len(numbers) * self._row_bytes)
        target = raw.numpy().data
        for begin, end in runs:
            part = target[begin * self._row_bytes : end * self._row_bytes]
            self._file.read_into(part, self._start(int(numbers[begin])), self._info.name)
        found = raw.view(self._dtype).view(-1, self.shape[1])
        if not is_finite(found):
            raise CheckpointError(f"{self.name} holds NaN or infinity; the file is damaged")
        return found

    def pieces(self) -> Iterator[tuple[int, Tensor]]:
        """(first row, [n, D] as stored) over the whole matrix, 8 MB at a time, each valid until the next.

        Raises CheckpointError when they can not be read; NaN and infinity pass.
        """
        total = self.shape[0]
        step = max(1, PIECE_BYTES // self._row_bytes)
        room = fresh_memory(min(step, total) * self._row_bytes)
        for first in range(0, total, step):
            count = min(step, total - first)
            ahead = min(step, total - first - count) * self._row_bytes
            self._file.read_ahead(self._start(first + count), ahead)
            raw = room[: count * self._row_bytes]
            self._file.read_into(raw.numpy().data, self._start(first), self._info.name)
            yield first, raw.view(self._dtype).view(count, -1)

    def _start(self, row: int) -> int:
        return self._info.start + row * self._row_bytes
