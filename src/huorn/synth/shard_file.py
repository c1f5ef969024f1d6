"""One shard: its safetensors header, and any piece of its bytes on request."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Sequence

from huorn.synth.numbers import Bytes, NumberSource
from huorn.synth.tensors import SynthTensor


class ShardContent:
    """The bytes of one shard. `fill` may be called from several threads and in any order, once `source` is prepared."""

    def __init__(self, tensors: Sequence[SynthTensor], source: NumberSource) -> None:
        self._source = source
        self._tensors = list(tensors)
        self._header = _header(tensors)
        self._starts = [len(self._header)]
        for tensor in tensors:
            self._starts.append(self._starts[-1] + tensor.nbytes)

    @property
    def size(self) -> int:
        """Bytes of the whole file."""
        return self._starts[-1]

    def fill(self, offset: int, out: Bytes) -> None:
        """Write bytes [offset, offset + len(out)) of the file into `out`, which must end within the file."""
        header = self._header[offset : offset + len(out)]
        out[: len(header)] = memoryview(header)
        done = len(header)
        index = bisect_right(self._starts, offset + done) - 1
        while done < len(out):
            tensor, start = self._tensors[index], self._starts[index]
            inside = offset + done - start
            count = min(len(out) - done, tensor.nbytes - inside)
            self._fill_tensor(tensor, inside, out[done : done + count])
            done += count
            index += 1

    def _fill_tensor(self, tensor: SynthTensor, start: int, out: Bytes) -> None:
        """Write bytes [start, start + len(out)) of the tensor into `out`."""
        self._source.fill(tensor.name, tensor.values, start, out)
        row_bytes, itemsize = tensor.shape[-1] * tensor.values.itemsize, tensor.values.itemsize
        end = start + len(out)
        for band in tensor.bands:
            left, right = (column * itemsize for column in band.columns)
            for row in range(max(band.rows[0], start // row_bytes), min(band.rows[1], -(-end // row_bytes))):
                first, last = max(start, row * row_bytes + left), min(end, row * row_bytes + right)
                if first < last:
                    self._source.fill(tensor.name, band.values, first, out[first - start : last - start])


def _header(tensors: Sequence[SynthTensor]) -> bytes:
    """Length and JSON of a safetensors header, padded with spaces to a multiple of eight as the library does."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for tensor in tensors:
        end = position + tensor.nbytes
        entries[tensor.name] = {
            "dtype": tensor.values.dtype,
            "shape": tensor.shape,
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
