"""CPU and memory limits of the cgroup this process runs in (versions 1 and 2, also a mix of both).

A limit may be set at any level, so the process's group and all groups above it are read and the tightest wins. Inside
a container the path in /proc/self/cgroup may not be visible; then the mounted root of the controller is what is left.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from huorn.machine.facts import ram_bytes

PROC_CGROUP = Path("/proc/self/cgroup")
CGROUP_ROOT = Path("/sys/fs/cgroup")
UNLIMITED_BYTES = 1 << 60  # version 1 writes 2^63 rounded down to a page for "no limit"


@dataclass(frozen=True)
class MemoryLimit:
    """Limit and present use of the tightest group, in bytes."""

    bytes: int
    used_bytes: int


def cpu_quota(proc: Path = PROC_CGROUP, root: Path = CGROUP_ROOT) -> float | None:
    """Cores granted by the tightest quota (1.5 = one and a half cores); None without a quota."""
    quotas = []
    for group in _groups("cpu", proc, root):
        if (group / "cpu.max").exists():  # version 2: "150000 100000" or "max 100000"
            quota, period = (group / "cpu.max").read_text().split()
        elif (group / "cpu.cfs_quota_us").exists():  # version 1: -1 for no limit
            quota, period = _read(group / "cpu.cfs_quota_us"), _read(group / "cpu.cfs_period_us")
        else:
            continue
        if quota != "max" and int(quota) > 0:
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def memory_limit(proc: Path = PROC_CGROUP, root: Path = CGROUP_ROOT) -> MemoryLimit | None:
    """The limit that leaves least room; None without a limit."""
    limits = []
    for group in _groups("memory", proc, root):
        for limit_name, used_name in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limit = _read(group / limit_name)
            if limit.isdigit() and int(limit) < UNLIMITED_BYTES:
                limits.append(MemoryLimit(int(limit), int(_read(group / used_name) or 0)))
    return min(limits, key=lambda limit: limit.bytes - limit.used_bytes, default=None)


def available_bytes() -> int:
    """RAM that a new process can have: what the kernel calls available, within the cgroup's limit."""
    _, available = ram_bytes()
    limit = memory_limit()
    return available if limit is None else max(0, min(available, limit.bytes - limit.used_bytes))


def _groups(controller: str, proc: Path, root: Path) -> Iterator[Path]:
    """Folders of the process's group and the groups above it, for one controller, in whichever versions are mounted."""
    if not proc.exists():
        return
    for line in proc.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # version 2
            mounts = [mount for mount in (root, root / "unified") if (mount / "cgroup.controllers").exists()]
        elif controller in controllers.split(","):
            mounts = [mount for mount in (root / controllers, root / controller) if mount.is_dir()][:1]
        else:
            continue
        for mount in mounts:
            group = mount / path.lstrip("/")
            yield from (folder for folder in (group, *group.parents) if folder.is_relative_to(mount))


def _read(path: Path) -> str:
    return path.read_text().strip() if path.exists() else ""
