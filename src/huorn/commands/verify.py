"""`huorn verify`: is a checkpoint whole?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from huorn.checkpoint.verify import VerifyReport
from huorn.checkpoint.verify import verify as verify_checkpoint
from huorn.commands.output import check_json_path, write_json
from huorn.commands.progress import byte_progress
from huorn.engine.session import text_problems
from huorn.errors import CheckpointError
from huorn.memory import format_bytes


def verify(directory: Path, manifest: Path | None, json_path: Path | None) -> None:
    """Print what a checkpoint holds and what is wrong with it. Raises CheckpointError when anything is."""
    check_json_path(json_path)
    with byte_progress("reading") as progress:
        report = verify_checkpoint(directory, manifest, progress)
    if report.tensors_by_kind:  # else its config could not be read, which the report says
        report.problems += text_problems(directory)
    for line in _lines(report):
        print(line)
    write_json(json_path, _as_json(report))
    if not report.ok:
        count = len(report.problems)
        raise CheckpointError(f"{directory} has {count} problem{'s' if count > 1 else ''}: do not use it")


def _lines(report: VerifyReport) -> list[str]:
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(report.tensors_by_kind.items()))
    dtypes = ", ".join(f"{count} {dtype}" for dtype, count in sorted(report.tensors_by_dtype.items()))
    sums = "no manifest, so no checksum was compared"
    if report.manifest is not None:
        sums = f"{report.checksums_matched} files have the SHA-256 of {report.manifest}"
    problems = [f"problem: {problem}" for problem in report.problems]
    if not report.tensors_by_kind:
        return problems
    facts = [
        f"{report.tensors_by_kind.total()} tensors: {kinds or 'none'}",
        f"stored as: {dtypes or 'nothing'}",
        f"{format_bytes(report.bytes_read)} read",
        sums,
    ]
    return facts + (problems or ["whole"])


def _as_json(report: VerifyReport) -> dict[str, Any]:
    return {
        "directory": str(report.directory),
        "ok": report.ok,
        "problems": report.problems,
        "tensors_by_kind": dict(report.tensors_by_kind),
        "tensors_by_dtype": dict(report.tensors_by_dtype),
        "bytes_read": report.bytes_read,
        "manifest": None if report.manifest is None else str(report.manifest),
        "checksums_matched": report.checksums_matched,
    }
