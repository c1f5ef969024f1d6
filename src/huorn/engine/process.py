"""What the operating system knows about this process: its age and its memory."""

from __future__ import annotations

import os
import resource
import sys
import time
from pathlib import Path

_IMPORTED_AT = time.monotonic()


def started_at() -> float:
    """Return the time.monotonic() reading, in seconds, at which this process started.

    Linux keeps the start in ticks of 10 ms since boot (proc_pid_stat(5), field 22). Elsewhere it is the time this module was
    imported, some 0.2 s late.
    """
    stat = Path("/proc/self/stat")
    if not stat.exists():
        return _IMPORTED_AT
    after_name = stat.read_text().rpartition(")")[2].split()  # the name may hold spaces; field 3 follows it
    since_boot = int(after_name[22 - 3]) / os.sysconf("SC_CLK_TCK")
    return time.monotonic() - (time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot)


def peak_rss_bytes() -> int:
    """Return the largest resident memory of this process so far, in bytes.

    VmHWM and not getrusage: the latter keeps the peak of the parent across exec, so a child of a large process starts large.
    """
    status = Path("/proc/self/status")
    if status.exists():
        lines = (line.split() for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        for _, kib, _ in lines:
            return int(kib) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
