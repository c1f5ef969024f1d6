"""`huorn doctor`: what this machine has and what would run on it."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from rich.console import Console
from rich.table import Table

from huorn.commands.output import check_json_path, write_json
from huorn.doctor import inspect_machine
from huorn.errors import UsageError, reason


def doctor(disk: Path, json_path: Path | None) -> None:
    """Measure and print. `disk`: a folder on the disk to measure. Raises UsageError when it is not there."""
    check_json_path(json_path)
    try:
        disk.stat()
    except OSError as error:
        raise UsageError(f"--disk {disk}: {reason(error)}; name a folder on the disk to measure") from error
    report = inspect_machine(disk)
    table = Table(show_header=False, box=None, pad_edge=False)
    for section, rows in groupby(report.rows(), key=lambda row: row[0]):
        for number, (_, fact, value) in enumerate(rows):
            table.add_row("" if number else section, fact, value)
    Console().print(table, markup=False)
    write_json(json_path, report.to_dict())
