"""The runs of an unfinished benchmark, so that the same command goes on where it was interrupted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from huorn.bench.arms import ArmResult, ArmRun
from huorn.errors import UsageError, first_problem


class _Line(BaseModel):
    model_config = ConfigDict(extra="forbid")

    run: ArmRun
    result: ArmResult


class RunLog:
    """One line of JSON per run, in order. A last line that was cut short is dropped."""

    def __init__(self, path: Path) -> None:
        """Reads what is there. UsageError when it is something else."""
        self._path, self._asked = path, 0
        lines = path.read_bytes().split(b"\n") if path.exists() else [b""]
        try:
            self._done = [_Line.model_validate_json(line) for line in lines[:-1]]
        except ValidationError as error:
            raise UsageError(f"{path} is damaged: {first_problem(error)}; delete it to start anew") from error
        if lines[-1]:
            path.write_bytes(b"".join(line + b"\n" for line in lines[:-1]))

    def get(self, run: ArmRun, execute: Callable[[ArmRun], ArmResult]) -> ArmResult:
        """The result of the next run, executed where it is not in the log. UsageError when the log has another run there."""
        number, self._asked = self._asked, self._asked + 1
        if number < len(self._done):
            if self._done[number].run != run:
                raise UsageError(
                    f"{self._path} holds runs of another command: name another folder, or delete it to start anew"
                )
            return self._done[number].result
        line = _Line(run=run, result=execute(run))
        with self._path.open("ab") as file:
            file.write(line.model_dump_json().encode() + b"\n")
        return line.result

    def remove(self) -> None:
        """All is in the report."""
        self._path.unlink(missing_ok=True)
