"""`huorn doctor`: facts and verdicts as a table and as JSON."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from huorn.doctor import MachineReport, fit, inspect_machine, report
from huorn.doctor.fit import ModelFit, model_fits
from huorn.machine import limits, speed
from huorn.machine.facts import Gpu
from huorn.machine.limits import MemoryLimit
from huorn.machine.speed import ReadSpeed


def test_fit_counts_resident_bytes_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        fit, "resident_set_bytes", lambda: 500_000_000
    )  # this process holds what other tests left
    large = model_fits(64 << 30, context=4096)[-1]
    assert large.fits
    assert large.resident_bytes < 5e9 < 32e9 < large.mapped_bytes
    assert "experts are read from disk" in large.sentence()
    tight = model_fits(3 << 29, context=4096)[-1]
    assert not tight.fits
    assert "1.6 GB are available" in tight.sentence()
    longer = model_fits(64 << 30, context=8192)[-1]
    assert longer.resident_bytes - large.resident_bytes == pytest.approx(4096 * 20 * 1024, abs=50e6)


@pytest.fixture(scope="module")
def looked(tmp_path_factory: pytest.TempPathFactory) -> MachineReport:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(speed, "PROBE_BYTES", 8 << 20)
        patch.setattr(speed, "RAM_PROBE_BYTES", 8 << 20)
        return inspect_machine(tmp_path_factory.mktemp("disk"))


def test_report_of_this_machine(looked: MachineReport) -> None:
    assert 1 <= looked.cores_usable <= looked.cores_allowed <= looked.cores_present
    assert 0 < looked.ram_available_bytes <= looked.ram_total_bytes
    assert looked.disk_free_bytes > 0
    assert [backend.name for backend in looked.backends if backend.usable] == ["reference", "cpu"]
    saved = json.loads(json.dumps(looked.to_dict(), allow_nan=False))
    assert saved["disk_read"]["bytes_per_s"] > 0
    assert saved["models"][-1]["name"] == "Qwen3.5-35B-A3B FP8"


def test_rows_say_what_the_facts_say(looked: MachineReport) -> None:
    other = replace(
        looked,
        cores_present=8,
        cores_allowed=4,
        cpu_quota=1.5,
        cores_usable=1,
        ram_total_bytes=16 * 10**9,
        ram_available_bytes=3 * 10**9,
        ram_limit_bytes=4 * 10**9,
        ram_read=None,
        disk_read=ReadSpeed(2.04e9, "through the page cache: no O_DIRECT here"),
        gpus=(Gpu("NVIDIA H200", 150 * 10**9, usable_by_torch=False),),
        models=(ModelFit("big", 5 * 10**9, 30 * 10**9, 3 * 10**9, fits=False),),
    )
    rows = {(section, fact): value for section, fact, value in other.rows()}
    assert rows["CPU", "cores"] == "1 usable (8 present, 4 in the affinity mask, 1.5 by cgroup quota)"
    assert rows["RAM", "size"] == "16.0 GB, 3.0 GB available, cgroup limit 4.0 GB"
    assert rows["RAM", "read speed"].startswith("not measured")
    assert rows["disk", "read speed"] == "2.0 GB/s (through the page cache: no O_DIRECT here)"
    assert rows["GPU", "NVIDIA H200"] == "150.0 GB, this PyTorch cannot use it"
    assert rows["backend", "cuda"] == "not in this version"
    assert rows["model", "big"] == "does not fit: 5.0 GB must stay in RAM, 3.0 GB are available"
    assert ("GPU", "none", "") in replace(looked, gpus=()).rows()


def test_cgroup_limit_bounds_what_is_available(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "PROBE_BYTES", 8 << 20)
    monkeypatch.setattr(speed, "RAM_PROBE_BYTES", 8 << 20)
    for module in (report, limits):
        monkeypatch.setattr(module, "memory_limit", lambda: MemoryLimit(3 << 30, 1 << 30))
    found = inspect_machine(tmp_path)
    assert (found.ram_limit_bytes, found.ram_available_bytes) == (3 << 30, 2 << 30)
