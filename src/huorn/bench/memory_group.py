"""A memory cgroup of its own, for arms that live in the page cache."""

from __future__ import annotations

import os
from pathlib import Path

V1, V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")


class MemoryGroup:
    """A cgroup (version 1 or 2) with a limit; a process enters by writing 0 to `tasks`. Gone at the end."""

    def __init__(self, limit: int) -> None:
        """OSError when this process may not make one."""
        first = (V1 / "memory.limit_in_bytes").exists()
        root, name = (V1, "memory.limit_in_bytes") if first else (V2, "memory.max")
        self.folder = root / f"huorn-{os.getpid()}"
        self.folder.mkdir()
        (self.folder / name).write_text(str(limit))
        self.tasks = self.folder / ("tasks" if first else "cgroup.procs")

    def close(self) -> None:
        """Its processes must have ended."""
        self.folder.rmdir()
