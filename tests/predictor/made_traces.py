"""Traces with made-up numbers, whose routing depends on the token and on the layer's hidden state through a known router."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from huorn.trace.layout import CAPTURED, ROW, ROWS, Captured, chunk_folder, layer_file, layer_record
from huorn.trace.manifest import (
    ChunkEntry,
    Duplicates,
    FileEntry,
    Manifest,
    PromptEntry,
    RecordedModel,
    Source,
    Split,
    write_manifest,
)

FINGERPRINT = "ab" * 32
ZEROS = "0" * 64


@dataclass(frozen=True)
class Shape:
    layers: int = 7
    experts: int = 12
    top_k: int = 3
    hidden: int = 16
    vocab: int = 40


@dataclass(frozen=True)
class Made:
    """What was written, row after row; ids [L, N, K], hidden [L, N, D], logits [L, N, E]."""

    shape: Shape
    counts: Sequence[int]
    splits: Sequence[Split]
    token: np.ndarray
    next_token: np.ndarray
    hidden: np.ndarray
    logits: np.ndarray
    ids: np.ndarray
    routers: np.ndarray = field(repr=False)  # [L, E, D]
    biases: np.ndarray = field(repr=False)

    @property
    def starts(self) -> np.ndarray:
        return np.cumsum(self.counts) - np.array(self.counts)


def make(
    counts: Sequence[int],
    splits: Sequence[Split],
    shape: Shape = Shape(),  # frozen
    seed: int = 0,
    shuffled: bool = False,
) -> Made:
    """`shuffled`: routing of each layer is permuted over all rows, so that nothing but popularity can be learned."""
    rng = np.random.default_rng(seed)
    rows = sum(counts)
    token = rng.integers(0, shape.vocab, rows)
    next_token = np.append(token[1:], -1)
    next_token[np.cumsum(counts) - 1] = rng.integers(0, shape.vocab, len(counts))
    embedding = rng.standard_normal((shape.layers, shape.vocab, shape.hidden))
    hidden = (embedding[:, token] + 0.3 * rng.standard_normal((shape.layers, rows, shape.hidden))).astype(
        np.float16
    )
    routers = rng.standard_normal((shape.layers, shape.experts, shape.hidden)) / 2
    biases = rng.standard_normal((shape.layers, shape.experts)) / 2
    logits = np.einsum("lnd,led->lne", hidden.astype(np.float64), routers) + biases[:, None]
    if shuffled:
        for layer in range(shape.layers):
            logits[layer] = logits[layer][rng.permutation(rows)]
            hidden[layer] = hidden[layer][rng.permutation(rows)]
    ids = np.argsort(-logits, axis=2, kind="stable")[..., : shape.top_k].astype(np.int16)
    return Made(
        shape, counts, splits, token, next_token, hidden, logits.astype(np.float16), ids, routers, biases
    )


def write(made: Made, folder: Path, captured: tuple[Captured, ...] = CAPTURED) -> Path:
    """As huorn trace record would, two prompts a chunk."""
    shape, starts = made.shape, made.starts
    record = layer_record(captured, shape.hidden, shape.experts, shape.top_k)
    prompts, chunks = [], []
    for number, first_prompt in enumerate(range(0, len(made.counts), 2)):
        mine = range(first_prompt, min(first_prompt + 2, len(made.counts)))
        at = np.concatenate([np.arange(starts[p], starts[p] + made.counts[p]) for p in mine])
        rows = np.zeros(len(at), ROW)
        rows["prompt"] = np.repeat(list(mine), [made.counts[p] for p in mine])
        rows["step"] = np.concatenate([np.arange(made.counts[p]) for p in mine])
        rows["position"] = rows["step"]
        known = "hidden" in captured
        rows["id"] = made.token[at] if known else -1
        rows["next_id"] = made.next_token[at] if known else -1
        path = folder / chunk_folder(number)
        path.mkdir(parents=True)
        rows.tofile(path / ROWS)
        for layer in range(shape.layers):
            values = np.zeros(len(at), record)
            for name in captured:
                values[name] = {
                    "hidden": made.hidden, "logits": made.logits, "ids": made.ids,
                    "weights": np.full(made.ids.shape, 1 / shape.top_k),
                }[name][layer, at]  # fmt: skip
            values.tofile(path / layer_file(layer))
        files = {
            file.name: FileEntry(
                bytes=file.stat().st_size, sha256=hashlib.sha256(file.read_bytes()).hexdigest()
            )
            for file in sorted(path.iterdir())
        }
        chunks.append(ChunkEntry(name=path.name, rows=len(at), files=files))
        offset = 0
        for p in mine:
            prompts.append(
                PromptEntry(
                    sha256=f"{p:064x}", split=made.splits[p], group=p, chunk=number, first_row=offset,
                    rows=made.counts[p], prompt_tokens=0,
                )
            )  # fmt: skip
            offset += made.counts[p]
    write_manifest(
        folder,
        Manifest(
            model=RecordedModel(
                fingerprint=FINGERPRINT, name="made", layers=shape.layers, experts=shape.experts, top_k=shape.top_k,
                hidden=shape.hidden, vocab=shape.vocab,
            ),
            mode="teacher", tokens=256, precision="bf16", isa="portable", source=Source(name="made", sha256=ZEROS),
            split_by="prompt", captured=captured, chunk_rows=4096, duplicates=Duplicates(), prompts=tuple(prompts),
            chunks=tuple(chunks),
        ),
    )  # fmt: skip
    return folder


def splits_of(train: int, validation: int, test: int) -> list[Split]:
    return ["train"] * train + ["validation"] * validation + ["test"] * test
