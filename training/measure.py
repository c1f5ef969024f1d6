"""What is measured of seedling while it trains: bits per byte on held-out files and how alike tokens route."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from huorn.trace.routing_stats import hottest_quarter, overlap
from training.model import Seedling

WINDOW = 2048  # tokens of context per measured piece


@dataclass(frozen=True)
class Document:
    """One held-out file as tokens, with the bytes that they stand for."""

    kind: str
    name: str
    tokens: Tensor  # int64 [T], <|endoftext|> first: the model sees it as the start of a document
    text_bytes: int


def held_out(work: Path, limit_tokens: int | None = None) -> list[Document]:
    """The held-out files in work/heldout.jsonl. With a limit: per kind, whole files in file order up to it."""
    tokenizer = Tokenizer.from_file(str(work / "tokenizer.json"))
    start = tokenizer.token_to_id("<|endoftext|>")
    documents, used = [], dict[str, int]()
    for line in (work / "heldout.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if limit_tokens is not None and used.get(row["kind"], 0) >= limit_tokens:
            continue
        ids = tokenizer.encode(row["text"], add_special_tokens=False).ids
        used[row["kind"]] = used.get(row["kind"], 0) + len(ids)
        documents.append(
            Document(row["kind"], row["name"], torch.tensor([start, *ids]), len(row["text"].encode("utf-8")))
        )
    return documents


@torch.no_grad()
def bits_per_byte(model: Seedling, documents: Sequence[Document]) -> dict[str, float]:
    """Per kind: total negative log2 likelihood over total bytes, each file in pieces of `WINDOW` tokens."""
    nats, sizes = dict[str, float](), dict[str, int]()
    for document in documents:
        inputs, targets = document.tokens[:-1], document.tokens[1:]
        for at in range(0, len(targets), WINDOW):
            piece = inputs[None, at : at + WINDOW]
            loss, _ = model.loss(piece, targets[None, at : at + WINDOW])
            nats[document.kind] = nats.get(document.kind, 0.0) + float(loss) * piece.numel()
        sizes[document.kind] = sizes.get(document.kind, 0) + document.text_bytes
    return {kind: nats[kind] / math.log(2) / sizes[kind] for kind in nats}


@dataclass(frozen=True)
class RoutingFigures:
    """How a batch routed, over all layers: what a cache of experts lives from."""

    overlap: float  # share of a token's experts that the previous token used too
    hottest_quarter: float  # share of routed pairs that the most used quarter of a layer's experts take
    dead: int  # experts of any layer that no token used


def routing_figures(routing: Sequence[Tensor], experts: int, sequences: int) -> RoutingFigures:
    """routing: ids [B * S, K] of each layer, B sequences of S tokens."""
    ids = torch.stack(list(routing), dim=1).to(torch.int32).numpy()  # [B * S, L, K]
    parts = np.split(ids, sequences)
    used = [np.unique(layer).size for layer in ids.transpose(1, 0, 2)]
    return RoutingFigures(
        sum(overlap(part) for part in parts) / sequences,
        hottest_quarter(ids, experts),
        sum(experts - count for count in used),
    )
