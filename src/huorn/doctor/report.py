"""What this machine has and what huorn can run on it: the facts behind `huorn doctor`.

    report = inspect_machine(Path.cwd())        # about 3 s: two short speed measurements
    for section, fact, value in report.rows():  # one table, sections in order
        table.add_row(section, fact, value)
    json.dump(report.to_dict(), file)           # --json: the same facts as numbers

Everything is read from /proc, /sys and the installed packages; a fact that the system does not tell is None or "unknown".
"""

from __future__ import annotations

import os
import platform
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from huorn.doctor.fit import ModelFit, model_fits
from huorn.machine.facts import Gpu, allowed_cores, cpu_model, gpus, instruction_sets, ram_bytes, usable_cores
from huorn.machine.limits import available_bytes, cpu_quota, memory_limit
from huorn.machine.speed import ReadSpeed, measure_disk_read, measure_ram_read
from huorn.memory import format_bytes

# Backends of the design with what keeps each from running in this version; None = it runs.
BACKENDS = {
    "reference": None,
    "cpu": None,
    "cuda": "not in this version",
    "sycl": "not in this version",
}


@dataclass(frozen=True)
class Backend:
    """One backend of huorn on this machine and, when it is not usable, why."""

    name: str
    usable: bool
    reason: str


@dataclass(frozen=True)
class MachineReport:
    """Facts of one machine. Sizes in bytes, speeds in bytes per second."""

    cpu_model: str
    architecture: str
    instruction_sets: tuple[str, ...]
    cores_present: int
    cores_allowed: int  # affinity mask
    cpu_quota: float | None  # cores that the cgroup grants; None = no limit
    cores_usable: int
    ram_total_bytes: int
    ram_available_bytes: int  # also within the cgroup's limit
    ram_limit_bytes: int | None  # cgroup
    ram_read: ReadSpeed | None
    disk_path: str
    disk_free_bytes: int
    disk_read: ReadSpeed
    gpus: tuple[Gpu, ...]
    python_version: str
    torch_version: str
    backends: tuple[Backend, ...]
    models: tuple[ModelFit, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists, strings and numbers, ready for json.dump."""
        return asdict(self)

    def rows(self) -> list[tuple[str, str, str]]:
        """(section, fact, value) in print order; the section is repeated in each of its rows."""
        return [
            ("CPU", "model", f"{self.cpu_model} ({self.architecture})"),
            ("CPU", "cores", self._cores()),
            ("CPU", "instruction sets", ", ".join(self.instruction_sets) or "none that huorn uses"),
            ("RAM", "size", self._ram()),
            ("RAM", "read speed", _speed(self.ram_read)),
            ("disk", "folder", self.disk_path),
            ("disk", "free", format_bytes(self.disk_free_bytes)),
            ("disk", "read speed", _speed(self.disk_read)),
            *([("GPU", gpu.name, _gpu(gpu)) for gpu in self.gpus] or [("GPU", "none", "")]),
            ("software", "Python", self.python_version),
            ("software", "PyTorch", self.torch_version),
            *(("backend", b.name, "usable" if b.usable else b.reason) for b in self.backends),
            *(("model", fit.name, fit.sentence()) for fit in self.models),
        ]

    def _cores(self) -> str:
        limits = [f"{self.cores_present} present"]
        if self.cores_allowed != self.cores_present:
            limits.append(f"{self.cores_allowed} in the affinity mask")
        if self.cpu_quota is not None:
            limits.append(f"{self.cpu_quota:g} by cgroup quota")
        return f"{self.cores_usable} usable ({', '.join(limits)})"

    def _ram(self) -> str:
        total, available = format_bytes(self.ram_total_bytes), format_bytes(self.ram_available_bytes)
        limit = "" if self.ram_limit_bytes is None else f", cgroup limit {format_bytes(self.ram_limit_bytes)}"
        return f"{total}, {available} available{limit}"


def inspect_machine(disk: Path, context: int = 4096) -> MachineReport:
    """Gather all facts. `disk`: folder (or file) whose disk is measured; `context`: tokens of KV in the model rows.

    Takes about 3 s, nearly all of it the two speed measurements. Leaves no file behind.
    """
    allowed, quota = allowed_cores(), cpu_quota()
    (total, _), available = ram_bytes(), available_bytes()
    limit, cores = memory_limit(), usable_cores(allowed, quota)
    folder = disk if disk.is_dir() else disk.parent
    return MachineReport(
        cpu_model=cpu_model(),
        architecture=platform.machine(),
        instruction_sets=instruction_sets(),
        cores_present=os.cpu_count() or 1,
        cores_allowed=allowed,
        cpu_quota=quota,
        cores_usable=cores,
        ram_total_bytes=total,
        ram_available_bytes=available,
        ram_limit_bytes=None if limit is None else limit.bytes,
        ram_read=measure_ram_read(available, cores),
        disk_path=str(folder.resolve()),
        disk_free_bytes=shutil.disk_usage(folder).free,
        disk_read=measure_disk_read(disk),
        gpus=gpus(),
        python_version=platform.python_version(),
        torch_version=torch.__version__,
        backends=tuple(Backend(name, why is None, why or "") for name, why in BACKENDS.items()),
        models=model_fits(available, context),
    )


def _speed(speed: ReadSpeed | None) -> str:
    if speed is None:
        return "not measured: less than 1 GiB available"
    if speed.bytes_per_s == 0:
        return speed.note
    return f"{speed.bytes_per_s / 1e9:.1f} GB/s" + (f" ({speed.note})" if speed.note else "")


def _gpu(gpu: Gpu) -> str:
    return format_bytes(gpu.memory_bytes) + ("" if gpu.usable_by_torch else ", this PyTorch cannot use it")
