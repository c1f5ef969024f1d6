"""`huorn bench kernels`: every kernel beside the machine's limits."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from huorn.bench.kernels import KernelSpeed
from huorn.bench.kernels import bench_kernels as measure
from huorn.commands.output import check_json_path, write_json
from huorn.engine.session import checked_threads
from huorn.errors import UsageError


def bench_kernels(threads: int | None, repeats: int, json_path: Path | None) -> None:
    """Measure, and print one table per instruction set as it is ready."""
    check_json_path(json_path)
    if repeats < 1:
        raise UsageError(f"--repeats is {repeats}, but it must be 1 or more")
    threads = checked_threads(threads)
    speeds: list[KernelSpeed] = []
    for speed in measure(threads, repeats):
        if speeds and speeds[-1].isa != speed.isa:
            show([one for one in speeds if one.isa == speeds[-1].isa], threads)
        speeds.append(speed)
    show([one for one in speeds if one.isa == speeds[-1].isa], threads)
    kernels = [{**asdict(speed), "fraction": speed.fraction} for speed in speeds]
    write_json(json_path, {"threads": threads, "repeats": repeats, "kernels": kernels})


def show(speeds: list[KernelSpeed], threads: int) -> None:
    """Print the table of one instruction set."""
    limits = {speed.unit: speed.limit for speed in speeds}
    title = f"{speeds[0].isa}, {threads} threads; limits: " + ", ".join(
        f"{limit:.1f} {unit}" for unit, limit in limits.items()
    )
    table = Table("kernel", "", "", "of the limit", title=title, title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    for speed in speeds:
        table.add_row(escape(speed.name), f"{speed.speed:.1f}", speed.unit, f"{100 * speed.fraction:.0f} %")
    Console(width=100).print(table)
