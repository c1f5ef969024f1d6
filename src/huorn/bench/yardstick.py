"""The limits that kernels are compared with, measured in the same run: read bandwidth of RAM, and matmul peak."""

from __future__ import annotations

import time
from statistics import median

from huorn import _native
from huorn.errors import UsageError
from huorn.kernels.huge_pages import HugePages
from huorn.machine.limits import available_bytes

# Caches flatter smaller blocks: level 3 of a server CPU can be 300 MB and more.
READ_BYTES = 4 << 30


class ReadYardstick:
    """A native loop that reads 4 GiB on huge pages with all threads of a runtime.

    Used between the runs that it judges, since what RAM gives here differs by a third from one minute to the next.
    """

    def __init__(self, runtime: _native.Runtime) -> None:
        """Takes the memory. UsageError when it is not there."""
        if available_bytes() < READ_BYTES * 5 // 4:
            free = available_bytes() / 1e9
            raise UsageError(
                f"the yardstick reads a block of {READ_BYTES / 1e9:.1f} GB and {free:.1f} GB are free: free some memory"
            )
        self._runtime = runtime
        self.block = HugePages(READ_BYTES).take(READ_BYTES)
        # Untouched pages are all one page of zeros, which a cache serves. As E4M3 a normal number, as BF16 and F32 too.
        self.block.fill_(0x35)

    def read_bytes_s(self) -> float:
        """Bytes per second: the median of three passes, after one that is not timed.

        The first pass after a model has run reaches two thirds of the next ones (16 to 18 GB/s, then 26 to 29)."""
        return median([self._pass() for _ in range(4)][1:])

    def _pass(self) -> float:
        start = time.perf_counter()
        self._runtime.read_memory(self.block.data_ptr(), READ_BYTES)
        return READ_BYTES / (time.perf_counter() - start)


def matmul_flops(runtime: _native.Runtime, seconds: float = 0.1) -> float:
    """Floating-point operations per second of this variant's multiply instruction alone, on registers or tiles."""
    rounds = 1 << 14
    while True:
        start = time.perf_counter()
        operations = runtime.multiply(rounds)
        spent = time.perf_counter() - start
        if spent >= seconds:
            return operations / spent
        rounds *= 4
