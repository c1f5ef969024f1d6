"""manifest.json of a trace: what was recorded, of which model, in which split, and the checksums of its files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from huorn.errors import TraceError, first_problem, reason
from huorn.files import write_atomically
from huorn.trace.layout import (
    MANIFEST,
    MOST_EXPERTS,
    ROW,
    ROWS,
    Captured,
    chunk_folder,
    layer_file,
    layer_record,
)

SCHEMA = "huorn trace v1"
Mode = Literal["decode", "teacher", "import"]
Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = ("train", "validation", "test")

_STRICT = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)
Count = Annotated[int, Field(ge=0, le=2**62)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class RecordedModel(BaseModel):
    """Whose routing it is. An imported trace knows no fingerprint, hidden size and vocabulary."""

    model_config = _STRICT
    fingerprint: Sha256 | None
    name: str
    layers: Annotated[int, Field(ge=1, le=4096)]
    experts: Annotated[int, Field(ge=1, le=MOST_EXPERTS)]
    top_k: Annotated[int, Field(ge=1, le=MOST_EXPERTS)]
    hidden: Annotated[int, Field(ge=1, le=2**31)] | None
    vocab: Annotated[int, Field(ge=1, le=2**31)] | None


class Source(BaseModel):
    """The file that was recorded from: prompts, or an imported trace."""

    model_config = _STRICT
    name: str
    sha256: Sha256


class PromptEntry(BaseModel):
    """One prompt: its rows are [first_row, first_row + rows) of `chunk`, which is null until it is recorded.

    `sha256` of what was given; prompts of one `group` are duplicates of each other, or pieces of one turn. `prompt_tokens` were
    read before the first row.
    """

    model_config = _STRICT
    sha256: Sha256
    split: Split
    group: Count
    chunk: Count | None
    first_row: Count
    rows: Count
    prompt_tokens: Count


class FileEntry(BaseModel):
    """Size and checksum of one file."""

    model_config = _STRICT
    bytes: Count
    sha256: Sha256


class ChunkEntry(BaseModel):
    """One chunk folder, with its files by name."""

    model_config = _STRICT
    name: str
    rows: Annotated[int, Field(ge=1, le=2**40)]
    files: dict[str, FileEntry]


class NearDuplicate(BaseModel):
    """Two prompts that share so many of their shingles, 0 to 1 (Jaccard), that they went to one split."""

    model_config = _STRICT
    first: Count
    second: Count
    similarity: float


class Duplicates(BaseModel):
    """Prompts with equal text, and pairs of alike ones: those that joined two groups, so not every pair of a group is named."""

    model_config = _STRICT
    exact: tuple[tuple[Count, ...], ...] = ()
    near: tuple[NearDuplicate, ...] = ()


class Manifest(BaseModel):
    """The whole file. `chunk_rows` is the number of rows from which a chunk is closed; `tokens` the most of one prompt.

    `precision` and `isa` are what the numbers were computed with. `split_by` prompt: whole groups of duplicates; time: the first
    four fifths of the rows train, as recordings without text are split.
    """

    model_config = _STRICT
    schema_: Literal["huorn trace v1"] = Field(default="huorn trace v1", alias="schema")
    model: RecordedModel
    mode: Mode
    tokens: Count | None
    precision: str | None
    isa: str | None
    source: Source
    split_by: Literal["prompt", "time"]
    captured: tuple[Captured, ...]
    chunk_rows: Annotated[int, Field(ge=1, le=2**31)]
    duplicates: Duplicates
    prompts: tuple[PromptEntry, ...]
    chunks: tuple[ChunkEntry, ...] = ()

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.model.top_k > self.model.experts:
            raise ValueError("top_k must not exceed experts")
        if "ids" not in self.captured:
            raise ValueError("captured must name ids")
        if "hidden" in self.captured and self.model.hidden is None:
            raise ValueError("hidden states were captured, but the model has no hidden size")
        names = {ROWS, *map(layer_file, range(self.model.layers))}
        for number, chunk in enumerate(self.chunks):
            if chunk.name != chunk_folder(number):
                raise ValueError(f"chunk {number} is called {chunk.name!r}, not {chunk_folder(number)}")
            if chunk.files.keys() != names:
                wrong = min(chunk.files.keys() ^ names)
                raise ValueError(f"{chunk.name} must have {ROWS} and one file for each layer; see {wrong!r}")
        for number, prompt in enumerate(self.prompts):
            if prompt.chunk is None:
                continue
            if prompt.chunk >= len(self.chunks):
                raise ValueError(f"prompt {number} is in chunk {prompt.chunk}, which is not there")
            if prompt.first_row + prompt.rows > self.chunks[prompt.chunk].rows:
                raise ValueError(f"the rows of prompt {number} leave its chunk")
        return self

    @property
    def rows(self) -> int:
        """Of all chunks."""
        return sum(chunk.rows for chunk in self.chunks)

    @property
    def recorded(self) -> int:
        """Prompts that are in a chunk."""
        return sum(prompt.chunk is not None for prompt in self.prompts)

    @property
    def record(self) -> np.dtype[Any]:
        """Of a row in the file of a layer."""
        model = self.model
        return layer_record(self.captured, model.hidden or 0, model.experts, model.top_k)

    @property
    def row_bytes(self) -> int:
        """What a row takes on disk, over all layers."""
        return ROW.itemsize + self.model.layers * self.record.itemsize


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Replaces manifest.json, whole or not at all. TraceError when the disk refuses."""
    path = folder / MANIFEST
    try:
        write_atomically(path, manifest.model_dump_json(by_alias=True, indent=1) + "\n")
    except (OSError, ValueError) as error:
        raise TraceError(f"{path} can not be written: {reason(error)}") from error


def read_manifest(folder: Path) -> Manifest:
    """TraceError when `folder` is no trace, or one of an unknown schema or with a damaged manifest."""
    path = folder / MANIFEST
    if not path.is_file():
        state = "has no manifest.json" if folder.is_dir() else "is no folder"
        raise TraceError(f"{folder} is not a trace: it {state}; huorn trace record and import write one")
    try:
        raw = path.read_bytes()
        value = json.loads(raw)
    except OSError as error:
        raise TraceError(f"{path} can not be read: {reason(error)}") from error
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{path} is not valid JSON ({error}); the trace is damaged") from error
    schema = value.get("schema") if isinstance(value, dict) else None
    if schema != SCHEMA:
        raise TraceError(f"{path} has the schema {schema!r}, but this version of huorn reads {SCHEMA!r}")
    try:
        return Manifest.model_validate_json(raw)
    except ValidationError as error:
        raise TraceError(f"{path} is damaged: {first_problem(error)}") from error
