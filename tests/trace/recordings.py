"""Traces with made-up numbers, written through the real writer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from huorn.trace.chunk_writer import ChunkWriter
from huorn.trace.folder import open_folder
from huorn.trace.layout import CAPTURED, ROW
from huorn.trace.manifest import SPLITS, Duplicates, Manifest, PromptEntry, RecordedModel, Source

MODEL = RecordedModel(fingerprint="a" * 64, name="m", layers=3, experts=6, top_k=2, hidden=4, vocab=100)


def manifest_of(count: int, /, chunk_rows: int = 5, **changes: object) -> Manifest:
    """`count` prompts in turn of train, validation and test."""
    entries = [
        PromptEntry(
            sha256=f"{number:064x}", split=SPLITS[number % 3], group=number, chunk=None, first_row=0, rows=0, prompt_tokens=7
        )
        for number in range(count)
    ]  # fmt: skip
    manifest = Manifest(
        model=MODEL, mode="decode", tokens=9, precision="bf16", isa="avx2", source=Source(name="p.jsonl", sha256="b" * 64),
        split_by="prompt", captured=CAPTURED, chunk_rows=chunk_rows, duplicates=Duplicates(), prompts=tuple(entries),
    )  # fmt: skip
    return manifest.model_copy(update=changes)


def write_numbers(index: int, rows: int, writer: ChunkWriter) -> None:
    """Rows of prompt `index`, from a seed of their own."""
    generator = np.random.default_rng(index)
    own = np.zeros(rows, ROW)
    own["prompt"], own["step"], own["position"] = index, np.arange(rows), 7 + np.arange(rows)
    own["id"], own["next_id"] = generator.integers(0, 100, (2, rows))
    writer.add_rows(own)
    for layer in range(MODEL.layers):
        writer.add_layer(
            layer,
            hidden=generator.standard_normal((rows, 4)).astype(np.float32),
            logits=generator.standard_normal((rows, 6)).astype(np.float32),
            ids=generator.random((rows, 6)).argsort(axis=1)[:, :2].astype(np.int32),
            weights=generator.random((rows, 2)).astype(np.float32),
        )


def write_trace(folder: Path, rows: Sequence[int], stop_at: int | None = None, **changes: object) -> Manifest:
    """Prompts with so many rows; an exception in the middle of prompt `stop_at`."""

    def write_prompt(index: int, writer: ChunkWriter) -> None:
        if index == stop_at:
            write_numbers(index, 1, writer)
            raise KeyboardInterrupt
        if rows[index]:
            write_numbers(index, rows[index], writer)

    with open_folder(folder, manifest_of(len(rows), **changes)) as opened:
        opened.fill(write_prompt, lambda done, total: None)
        return opened.manifest


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
