"""Imports run one way: what is computed knows nothing of who asks for it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "huorn"
# Each part with the parts it may import, besides itself, errors and files.
ALLOWED = {
    "checkpoint": {"_native"},
    "schedule": set[str](),
    "experts": {"_native", "checkpoint", "kernels"},
    "kernels": {"_native", "checkpoint"},
    "model": {"_native", "checkpoint", "kernels", "schedule"},
    "trace": {"checkpoint", "engine", "experts", "kernels", "memory", "model", "schedule"},
    "predictor": {"_native", "checkpoint", "kernels", "machine", "trace"},
    "machine": set[str](),
    "memory": {"checkpoint", "machine", "model", "schedule"},
    "synth": {"checkpoint", "machine", "memory"},
    "engine": {
        "_native",
        "checkpoint",
        "experts",
        "kernels",
        "machine",
        "memory",
        "model",
        "predictor",
        "schedule",
    },
    "doctor": {"checkpoint", "machine", "memory", "model", "synth"},
    "bench": {
        "experts",
        "predictor",
        "_native",
        "checkpoint",
        "engine",
        "kernels",
        "machine",
        "memory",
        "model",
        "schedule",
        "trace",
    },
}


def imported_parts(path: Path) -> set[str]:
    """Parts of huorn that a file imports, at the top or inside a function."""
    parts = set[str]()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        parts |= {name.split(".")[1] for name in names if name.startswith("huorn.")}
    return parts


@pytest.mark.parametrize("part", sorted(ALLOWED))
def test_part_imports_only_what_lies_below(part: str) -> None:
    files = (
        [SOURCE / f"{part}.py"] if (SOURCE / f"{part}.py").exists() else sorted((SOURCE / part).rglob("*.py"))
    )
    assert files, f"{part} is gone: take it out of this table"
    for file in files:
        wrong = imported_parts(file) - ALLOWED[part] - {part, "errors", "files", "assets"}
        assert not wrong, f"{file.relative_to(SOURCE)} imports {sorted(wrong)}"


SERVING = ("released", "served_bank", "native_features", "native_scorer", "bank_files/bank_loader")


@pytest.mark.parametrize("module", SERVING)
def test_what_serves_a_bank_knows_nothing_of_traces(module: str) -> None:
    """The engine imports it, and traces import the engine."""
    assert "trace" not in imported_parts(SOURCE / "predictor" / f"{module}.py")


def test_the_engine_imports_only_what_serves() -> None:
    allowed = {f"huorn.predictor.{module.replace('/', '.')}" for module in SERVING}
    for file in (SOURCE / "engine").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("huorn.predictor"):
                assert node.module in allowed, file
