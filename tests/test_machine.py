"""Facts of the machine from made-up /proc and cgroup trees; real measurements must leave nothing behind."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from huorn.machine import speed
from huorn.machine.facts import Gpu, cpu_model, gpus, instruction_sets, ram_bytes, usable_cores
from huorn.machine.limits import MemoryLimit, cpu_quota, memory_limit
from huorn.machine.speed import ReadSpeed, file_system, measure_disk_read, measure_ram_read

SAPPHIRE_RAPIDS = """\
processor\t: 0
model name\t: Intel(R) Xeon(R) Platinum 8481C
flags\t\t: fpu avx2 fma avx512f avx512bw avx512dq avx512vl avx512_bf16 avx512vbmi amx_bf16 amx_tile amx_int8

processor\t: 1
model name\t: another
flags\t\t: fpu
"""
GRAVITON = """\
processor\t: 0
Features\t: fp asimd bf16 i8mm sve
CPU implementer\t: 0x41
CPU part\t: 0xd40
"""


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def limits(root: Path) -> tuple[float | None, MemoryLimit | None]:
    place = (root / "self.cgroup", root / "cgroup")
    return cpu_quota(*place), memory_limit(*place)


def test_cpu_names_and_instruction_sets(tmp_path: Path) -> None:
    tree(tmp_path, {"intel": SAPPHIRE_RAPIDS, "arm": GRAVITON, "old": "flags\t: fpu avx2\n"})
    assert cpu_model(tmp_path / "intel") == "Intel(R) Xeon(R) Platinum 8481C"
    assert cpu_model(tmp_path / "arm") == "Arm implementer 0x41 part 0xd40"
    assert instruction_sets(tmp_path / "intel") == (
        "AVX2+FMA", "AVX-512", "AVX-512 BF16", "AVX-512 VBMI", "AMX BF16"
    )  # fmt: skip
    assert instruction_sets(tmp_path / "arm") == ("NEON", "NEON BF16", "SVE")
    assert instruction_sets(tmp_path / "old") == ()  # AVX2 alone is not AVX2+FMA
    assert instruction_sets(tmp_path / "none") == ()


def test_ram(tmp_path: Path) -> None:
    tree(
        tmp_path,
        {"meminfo": "MemTotal:  1000 kB\nMemFree:  100 kB\nMemAvailable:  400 kB\nHugePages_Total:   0\n"},
    )
    assert ram_bytes(tmp_path / "meminfo") == (1_024_000, 409_600)


@pytest.mark.parametrize(("quota", "cores"), [(None, 8), (2.0, 2), (1.5, 1), (0.5, 1), (16.0, 8)])
def test_usable_cores(quota: float | None, cores: int) -> None:
    assert usable_cores(8, quota) == cores


def test_cgroup_2_tightest_level_wins(tmp_path: Path) -> None:
    tree(
        tmp_path,
        {
            "self.cgroup": "0::/system.slice/job\n",
            "cgroup/cgroup.controllers": "cpu memory",
            "cgroup/system.slice/cpu.max": "150000 100000\n",
            "cgroup/system.slice/job/cpu.max": "400000 100000\n",
            "cgroup/system.slice/memory.max": "max\n",
            "cgroup/system.slice/job/memory.max": "8000000000\n",
            "cgroup/system.slice/job/memory.current": "1000\n",
        },
    )
    assert limits(tmp_path) == (1.5, MemoryLimit(8_000_000_000, 1000))


def test_cgroup_1_with_joined_controllers(tmp_path: Path) -> None:
    tree(
        tmp_path,
        {
            "self.cgroup": "4:memory:/box\n3:cpu,cpuacct:/box\n1:name=systemd:/\n",
            "cgroup/cpu,cpuacct/box/cpu.cfs_quota_us": "250000",
            "cgroup/cpu,cpuacct/box/cpu.cfs_period_us": "100000",
            "cgroup/memory/memory.limit_in_bytes": str(2**63 - 4096),
            "cgroup/memory/box/memory.limit_in_bytes": "4294967296",
            "cgroup/memory/box/memory.usage_in_bytes": "1048576",
        },
    )
    assert limits(tmp_path) == (2.5, MemoryLimit(1 << 32, 1 << 20))


def test_cgroup_without_limits(tmp_path: Path) -> None:
    assert limits(tmp_path) == (None, None)
    tree(
        tmp_path,
        {
            "self.cgroup": "3:cpu:/gone\n2:memory:/gone\n0::/\n",
            "cgroup/cpu/cpu.cfs_quota_us": "-1",
            "cgroup/cpu/cpu.cfs_period_us": "100000",
            "cgroup/memory/memory.limit_in_bytes": str(2**63 - 4096),
            "cgroup/unified/cgroup.controllers": "",
            "cgroup/unified/cpu.max": "max 100000",
        },
    )
    assert limits(tmp_path) == (None, None)


def test_gpus_of_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpus() == ()
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'NVIDIA H200, 143771'\n")
    tool.chmod(0o755)
    assert gpus() == (Gpu("NVIDIA H200", 143_771 << 20, usable_by_torch=False),)
    tool.write_text("#!/bin/sh\necho 'Failed to initialize NVML'; exit 1\n")
    assert gpus() == ()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure 8 MiB, not 512."""
    monkeypatch.setattr(speed, "PROBE_BYTES", 8 << 20)
    monkeypatch.setattr(speed, "RAM_PROBE_BYTES", 8 << 20)


@pytest.mark.usefixtures("quick")
def test_disk_probe_leaves_nothing_even_when_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert measure_disk_read(tmp_path).bytes_per_s > 1e6
    assert list(tmp_path.iterdir()) == []

    def interrupted(*_: object) -> int:
        assert list(tmp_path.iterdir()) == []  # nothing to see even now: kill -9 would leave nothing either
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        measure_disk_read(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("quick")
def test_disk_reads_a_large_file_that_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "small.bin").write_bytes(bytes(100))
    (model / "shard.safetensors").write_bytes(bytes(9 << 20))
    assert speed.largest_file(model) == model / "shard.safetensors"
    model.chmod(0o555)
    monkeypatch.setattr(speed, "_write_probe", lambda fd: pytest.fail("it wrote although a file was there"))
    assert measure_disk_read(model).bytes_per_s > 1e6
    assert measure_disk_read(model / "shard.safetensors").bytes_per_s > 1e6


@pytest.mark.usefixtures("quick")
def test_disk_without_direct_io_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = fcntl.fcntl

    def refuse(fd: int, command: int, flags: int = 0) -> int:
        if command == fcntl.F_SETFL:
            raise OSError(22, "Invalid argument")
        return real(fd, command, flags)

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    measured = measure_disk_read(tmp_path)
    assert measured.bytes_per_s > 1e6
    assert "page cache" in measured.note


def test_disk_that_can_not_be_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(speed, "_write_probe", full)
    assert measure_disk_read(tmp_path) == ReadSpeed(0.0, "not measured: No space left on device")


def test_file_system_is_that_of_the_deepest_mount(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    inner = tmp_path / "with space"
    inner.mkdir()
    point = str(inner.resolve()).replace(" ", "\\040")
    mounts.write_text(f"tmpfs {point} tmpfs rw 0 0\n/dev/a / ext4 rw 0 0\nproc /proc proc rw 0 0\n")
    assert file_system(inner, mounts) == "tmpfs"
    assert file_system(tmp_path, mounts) == "ext4"
    assert file_system(tmp_path, tmp_path / "none") == ""


@pytest.mark.usefixtures("quick")
def test_ram_speed() -> None:
    measured = measure_ram_read(4 << 30, threads=2)
    assert measured is not None
    assert measured.bytes_per_s > 1e7
    assert "rough" in measured.note
    assert measure_ram_read(1 << 29, threads=2) is None
