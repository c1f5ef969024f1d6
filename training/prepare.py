"""One command from pinned sources to training tokens: `python -m training.prepare --work DIR`.

Steps, each skipped when its outputs are in DIR already (delete them to redo it):
documents  sources/, documents.jsonl, heldout.jsonl, split.json
tokenizer  tokenizer.json
tokens     train.bin, train.docs.npy, train.kinds.npy, corpus.json
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import platform
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated

import numpy
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from tokenizers import Tokenizer

from training import corpus, tokenizer
from training.chat import chat_documents
from training.corpus import KINDS, Document, Source

SOURCES = Path(__file__).with_name("sources.toml")
CHAT_BYTES = {"train": 2_000_000, "held out": 200_000}
TOKENIZER_SAMPLE_BYTES = 20_000_000
SEED = 20_260_101
BATCH = 256  # documents per tokenizer call: about 8 MB of text, enough to keep every core busy

Counts = dict[str, dict[str, int]]


def prepare(
    work: Annotated[Path, typer.Option(help="Folder for downloads and outputs, outside the source tree.")],
) -> None:
    """Make seedling's tokenizer and training tokens in WORK."""
    work.mkdir(parents=True, exist_ok=True)
    console = Console()
    sources = corpus.read_sources(SOURCES)
    with Progress(console=console) as progress:
        _step(
            work,
            ("documents.jsonl", "heldout.jsonl", "split.json"),
            lambda: _documents(work, sources, progress),
        )
        _step(work, ("tokenizer.json",), lambda: _tokenizer(work, progress))
        _step(
            work,
            ("train.bin", "train.docs.npy", "train.kinds.npy", "corpus.json"),
            lambda: _tokens(work, sources, progress),
        )
    console.print(_summary(json.loads((work / "corpus.json").read_text())))


def _step(work: Path, outputs: tuple[str, ...], make: Callable[[], dict[str, bytes]]) -> None:
    """Runs `make` unless all outputs exist; each output appears whole or not at all."""
    if all((work / name).exists() for name in outputs):
        return
    made = make()
    for name in outputs:
        partial = work / f"{name}.partial"
        partial.write_bytes(made[name])
        os.replace(partial, work / name)


def _documents(work: Path, sources: list[Source], progress: Progress) -> dict[str, bytes]:
    docs: list[Document] = []
    for source in progress.track(sources, description="fetch and filter"):
        docs += corpus.collect(source, corpus.fetch(source, work / "sources"))
    progress.console.print("holding out files, dropping near-duplicates")
    split = corpus.split(docs)
    train = split.train + _chats(split.train, CHAT_BYTES["train"])
    held_out = split.held_out + _chats(split.held_out, CHAT_BYTES["held out"])
    return {
        "documents.jsonl": _lines(train),
        "heldout.jsonl": _lines(held_out),
        "split.json": _json({"train": _sizes(train), "held_out": _sizes(held_out), "removed": split.removed}),
    }


def _chats(docs: list[Document], max_bytes: int) -> list[Document]:
    """Chats of a split come from its own Python files only, so no held-out function is ever trained on."""
    return chat_documents((doc for doc in docs if doc.kind == "python"), max_bytes)


def _tokenizer(work: Path, progress: Progress) -> dict[str, bytes]:
    progress.console.print("training the tokenizer")
    texts, used = [], 0
    for doc in _shuffled(_read(work / "documents.jsonl")):
        if used + doc.size <= TOKENIZER_SAMPLE_BYTES:
            texts.append(doc.text)
            used += doc.size
    return {"tokenizer.json": tokenizer.train(texts).to_str(pretty=True).encode()}


def _tokens(work: Path, sources: list[Source], progress: Progress) -> dict[str, bytes]:
    bpe = Tokenizer.from_file(str(work / "tokenizer.json"))
    docs = _shuffled(_read(work / "documents.jsonl"))
    end = bpe.token_to_id(tokenizer.END_OF_TEXT)
    ids: list[numpy.ndarray[tuple[int], numpy.dtype[numpy.uint16]]] = []
    for first in progress.track(range(0, len(docs), BATCH), description="tokenize"):
        batch = [doc.text for doc in docs[first : first + BATCH]]
        encodings = bpe.encode_batch_fast(batch, add_special_tokens=False)
        ids += [numpy.array([*encoding.ids, end], dtype="<u2") for encoding in encodings]
    lengths = numpy.array([len(row) for row in ids], dtype=numpy.int64)
    kinds = numpy.array([KINDS.index(doc.kind) for doc in docs], dtype=numpy.uint8)
    train_bin = numpy.concatenate(ids).tobytes()
    tokens = {kind: int(lengths[kinds == number].sum()) for number, kind in enumerate(KINDS)}
    held_out = _read(work / "heldout.jsonl")
    held_tokens = {
        kind: tokenizer.count_tokens(bpe, [doc.text for doc in held_out if doc.kind == kind])
        for kind in KINDS
    }
    split = json.loads((work / "split.json").read_text())
    manifest = {
        "python": platform.python_version(),
        "kinds": list(KINDS),
        "train": _with_tokens(split["train"], tokens),
        "held_out": _with_tokens(split["held_out"], held_tokens),
        "near_duplicates_removed": len(split["removed"]),
        "train_bin_sha256": hashlib.sha256(train_bin).hexdigest(),
        "sources": [
            {
                "name": source.name,
                "version": _version(source),
                "licence": source.licence,
                "sha256": source.sha256,
            }
            for source in sources
        ],
        "held_out_names": [doc.name for doc in held_out],
    }
    return {
        "train.bin": train_bin,
        "train.docs.npy": _npy(numpy.cumsum(lengths) - lengths),
        "train.kinds.npy": _npy(kinds),
        "corpus.json": _json(manifest),
    }


def _version(source: Source) -> str:
    return platform.python_version() if source.registry == "stdlib" else source.version


def _shuffled(docs: list[Document]) -> list[Document]:
    """Documents in the training order: shuffled by SEED from the order of kinds and names."""
    docs = sorted(docs, key=lambda doc: (doc.kind, doc.name))
    random.Random(SEED).shuffle(docs)
    return docs


def _sizes(docs: Iterable[Document]) -> Counts:
    """Files and bytes per kind."""
    sizes: Counts = {kind: {"files": 0, "bytes": 0} for kind in KINDS}
    for doc in docs:
        sizes[doc.kind]["files"] += 1
        sizes[doc.kind]["bytes"] += doc.size
    return sizes


def _with_tokens(sizes: Counts, tokens: dict[str, int]) -> Counts:
    return {kind: {**row, "tokens": tokens[kind]} for kind, row in sizes.items()}


def _read(path: Path) -> list[Document]:
    with path.open(encoding="utf-8") as lines:
        return [Document(**json.loads(line)) for line in lines]


def _lines(docs: Iterable[Document]) -> bytes:
    rows = ({"kind": doc.kind, "name": doc.name, "text": doc.text} for doc in docs)
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def _json(value: object) -> bytes:
    return (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode()


def _npy(array: numpy.ndarray[tuple[int], numpy.dtype[numpy.generic]]) -> bytes:
    stream = io.BytesIO()
    numpy.save(stream, array)
    return stream.getvalue()


def _summary(manifest: dict[str, Counts]) -> Table:
    table = Table("kind", "files", "MB", "tokens", "bytes/token", "held-out KB", "held-out bytes/token")
    for kind, row in manifest["train"].items():
        held = manifest["held_out"][kind]
        table.add_row(
            kind,
            str(row["files"]),
            f"{row['bytes'] / 1e6:.2f}",
            f"{row['tokens']:,}",
            f"{row['bytes'] / max(1, row['tokens']):.2f}",
            f"{held['bytes'] / 1e3:.0f}",
            f"{held['bytes'] / max(1, held['tokens']):.2f}",
        )
    return table


if __name__ == "__main__":
    typer.run(prepare)
