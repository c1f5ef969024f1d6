"""What is remembered between an interrupted run of `huorn synth` and its continuation."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from huorn.errors import UsageError
from huorn.files import PART_SUFFIX

STATE_FILE = "huorn-synth-state.json"


@dataclass
class SynthState:
    """Request of a run and the shards it has finished (file name -> SHA-256, None without a manifest)."""

    preset: str
    layers: int
    seed: int
    manifest: bool
    version: str
    overlap: float | None = None
    finished: dict[str, str | None] = field(default_factory=dict)

    def save(self, directory: Path) -> None:
        """Replace the state file in one step. Not forced to disk: losing it costs a rewrite, forcing it a second a shard."""
        temporary = directory / (STATE_FILE + PART_SUFFIX)
        temporary.write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")
        temporary.replace(directory / STATE_FILE)

    def resume(self, directory: Path) -> None:
        """Take over the finished shards of an earlier run in `directory`, if there is one.

        Raises UsageError when the folder holds anything else, or a run of another preset, size, seed, overlap or version.
        """
        if not directory.exists() or not any(directory.iterdir()):
            return
        path = directory / STATE_FILE
        if not path.exists():
            raise UsageError(f"{directory} is not empty; give --out a new or empty folder")
        try:
            earlier = SynthState(**json.loads(path.read_text()))
        except (ValueError, TypeError) as error:
            raise UsageError(f"{path} is damaged; delete {directory} and start again") from error
        if earlier.request() != self.request():
            begun = ", ".join(
                f"{name} {value}" for name, value in earlier.request().items() if value is not None
            )
            raise UsageError(
                f"{directory} holds an unfinished run with {begun}; continue that one or delete the folder"
            )
        self.finished = {
            name: digest for name, digest in earlier.finished.items() if (directory / name).exists()
        }

    def request(self) -> dict[str, object]:
        """What must be equal for a run to be a continuation of another."""
        return {name: value for name, value in asdict(self).items() if name != "finished"}
