"""Judge exported checkpoints on the held-out files: `python -m training.evaluate --work DIR FOLDER...`.

Runs huorn's own decoder, not the training code: bits per byte per kind, and how the last checkpoint routes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from huorn.checkpoint.reader import Checkpoint
from huorn.model.decoder import Decoder
from huorn.model.load import load_decoder
from huorn.model.state import DecodeState
from training.export import trained_weights
from training.measure import WINDOW, Document, RoutingFigures, held_out, routing_figures
from training.model import Seedling, Shape

CHUNK = 512  # tokens per forward
ROUTING_TOKENS = 131_072  # over all kinds; every expert of 512 gets 2,048 pairs on average


def negative_log2(decoder: Decoder, document: Document) -> float:
    """Bits that the decoder needs for one file, read in windows of `WINDOW` tokens as in training."""
    bits = 0.0
    inputs, targets = document.tokens[:-1], document.tokens[1:]
    for at in range(0, len(targets), WINDOW):
        state = DecodeState.new(decoder.config, WINDOW, decoder.precision)
        for start in range(at, min(at + WINDOW, len(targets)), CHUNK):
            piece = slice(start, min(start + CHUNK, at + WINDOW))
            logits = decoder.forward(inputs[piece], state, all_logits=True)
            bits += float(F.cross_entropy(logits, targets[piece], reduction="sum")) / math.log(2)
    return bits


def bits_per_byte(folder: Path, documents: Sequence[Document]) -> dict[str, float]:
    """Per kind: bits over bytes of all its held-out files."""
    decoder = load_decoder(Checkpoint.open(folder))
    bits, sizes = dict[str, float](), dict[str, int]()
    for document in track(documents, description=f"{folder.name}: held-out files"):
        bits[document.kind] = bits.get(document.kind, 0.0) + negative_log2(decoder, document)
        sizes[document.kind] = sizes.get(document.kind, 0) + document.text_bytes
    return {kind: bits[kind] / sizes[kind] for kind in bits}


@torch.no_grad()
def routing(work: Path, documents: Sequence[Document]) -> RoutingFigures:
    """How the trained weights route held-out text of every kind, in windows of 1,024 tokens."""
    model = Seedling(Shape(), trained_weights(work))
    rows = [d.tokens[:1024] for d in documents if len(d.tokens) >= 1024][: ROUTING_TOKENS // 1024]
    layers: list[list[torch.Tensor]] = [[] for _ in range(Shape().num_hidden_layers)]
    for row in rows:
        model.hidden(row[None])
        for ids, collected in zip(model.routing, layers, strict=True):
            collected.append(ids)
    return routing_figures([torch.cat(ids) for ids in layers], Shape().num_experts, len(rows))


def main(
    folders: Annotated[list[Path], typer.Argument(help="exported checkpoints to compare")],
    work: Annotated[Path, typer.Option(help="folder of the training run, which holds the held-out files")],
    tokens: Annotated[
        int | None, typer.Option(help="stop after this many tokens of a kind; default: all")
    ] = None,
) -> None:
    """Print bits per byte of each checkpoint by kind, and write work/evaluation.json."""
    torch.set_num_threads(2)
    documents = held_out(work, tokens)
    results = {folder.name: bits_per_byte(folder, documents) for folder in folders}
    table = Table("kind", *results, title="bits per byte, held-out files")
    for kind in next(iter(results.values())):
        table.add_row(kind, *(f"{figures[kind]:.4f}" for figures in results.values()))
    console = Console()
    console.print(table)
    figures = routing(work, documents)
    console.print(
        f"consecutive tokens share {figures.overlap:.3f} of their experts; the hottest quarter takes "
        f"{figures.hottest_quarter:.3f} of use; {figures.dead} experts of 512 are dead"
    )
    summary = {"bits_per_byte": results, "tokens_per_kind": tokens, "routing": asdict(figures)}
    (work / "evaluation.json").write_text(json.dumps(summary, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
