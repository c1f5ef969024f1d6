"""CPU, RAM and GPU facts out of /proc, PyTorch and nvidia-smi."""

from __future__ import annotations

import os
import platform
import subprocess
from dataclasses import dataclass
from pathlib import Path

import torch

# Name shown -> flags of /proc/cpuinfo that must all be there. Only what a kernel of huorn would be written for.
INSTRUCTION_SETS = {
    "AVX2+FMA": {"avx2", "fma"},
    "AVX-512": {"avx512f", "avx512bw", "avx512dq", "avx512vl"},
    "AVX-512 BF16": {"avx512_bf16"},
    "AVX-512 VBMI": {"avx512vbmi"},
    "AMX BF16": {"amx_tile", "amx_bf16"},
    "NEON": {"asimd"},
    "NEON BF16": {"asimd", "bf16"},
    "SVE": {"sve"},
}


@dataclass(frozen=True)
class Gpu:
    """One GPU; `usable_by_torch` is False when only nvidia-smi sees it (a CPU build of PyTorch, an old driver)."""

    name: str
    memory_bytes: int
    usable_by_torch: bool


def usable_cores(allowed: int, quota: float | None) -> int:
    """Threads worth starting: a quota of 1.5 cores gets one, since the second would be throttled half of the time."""
    return max(1, allowed if quota is None else min(allowed, int(quota)))


def instruction_sets(cpuinfo: Path = Path("/proc/cpuinfo")) -> tuple[str, ...]:
    """Names out of INSTRUCTION_SETS whose flags the first core has (all cores of a machine huorn runs on have the same)."""
    flags = set((_cpuinfo(cpuinfo).get("flags") or _cpuinfo(cpuinfo).get("Features") or "").split())
    return tuple(name for name, needed in INSTRUCTION_SETS.items() if needed <= flags)


def cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Marketing name on x86; implementer and part number where an Arm kernel gives no name."""
    facts = _cpuinfo(cpuinfo)
    if "model name" in facts:
        return facts["model name"]
    if "CPU part" in facts:
        return f"Arm implementer {facts.get('CPU implementer', '?')} part {facts['CPU part']}"
    return platform.processor() or "unknown"


def gpus() -> tuple[Gpu, ...]:
    """GPUs that PyTorch can use; else those that nvidia-smi lists; else none."""
    if torch.cuda.is_available():
        cards = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
        return tuple(Gpu(card.name, card.total_memory, True) for card in cards)
    command = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        listing = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout
        lines = [line.rsplit(",", 1) for line in listing.splitlines() if "," in line]
        return tuple(Gpu(name.strip(), int(mebibytes) << 20, False) for name, mebibytes in lines)
    except (OSError, subprocess.SubprocessError, ValueError):
        return ()


def _cpuinfo(path: Path) -> dict[str, str]:
    """The first core's block of /proc/cpuinfo; empty where there is none."""
    if not path.exists():
        return {}
    block = path.read_text(errors="replace").split("\n\n", 1)[0]
    pairs = (line.split(":", 1) for line in block.splitlines() if ":" in line)
    return {key.strip(): value.strip() for key, value in pairs}


def allowed_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def ram_bytes(meminfo: Path = Path("/proc/meminfo")) -> tuple[int, int]:
    """(total, available) bytes; without /proc the physical size stands for both."""
    if not meminfo.exists():
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return total, total
    pairs = (line.split(":") for line in meminfo.read_text().splitlines() if ":" in line)
    kib = {key: int(value.split()[0]) for key, value in pairs}
    return kib["MemTotal"] << 10, kib.get("MemAvailable", kib["MemFree"]) << 10
