"""An expert-predictor bank from the corpus: `python -m training.make_bank --work DIR --out BANK`. Every step resumes."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from random import Random
from typing import Annotated

import typer

from huorn.assets import EMBEDDED_MODEL
from huorn.checkpoint.config import read_config
from huorn.files import write_atomically
from training.make_seedling import step

PIECE_CHARACTERS = 4000  # about 1,000 tokens; the recorder cuts at --tokens
LEAST_CHARACTERS = 400
NOTICE = (
    "The traces were recorded on permissively licensed code and documentation, which NOTICE of the huorn project lists source by "
    "source. The heads learn the routing of the base model, not the text."
)


def main(
    work: Annotated[Path, typer.Option(help="the folder that training.prepare filled")],
    out: Annotated[Path, typer.Option(help="the bank's folder")],
    model: Annotated[
        Path | None,
        typer.Option(help="a checkpoint, such as eight layers of huorn synth; default: the embedded model"),
    ] = None,
    documents: Annotated[int, typer.Option(help="one piece of so many documents at most")] = 4000,
    tokens: Annotated[int, typer.Option(help="tokens of each piece at most")] = 512,
    trunk: Annotated[int, typer.Option(help="units of each head's trunk")] = 256,
    epochs: Annotated[int, typer.Option(help="passes over the training rows at most")] = 4,
    profile: Annotated[str, typer.Option(help="features: huorn or card")] = "huorn",
    drawn: Annotated[
        int, typer.Option(help="texts of random ids besides, which is how a model of random weights goes on")
    ] = 0,
) -> None:
    """Write prompts, record, train, release."""
    name = "seedling" if model is None else model.name
    texts = f"{documents}" if not drawn else f"{documents}_{drawn}"
    prompts, traces = work / f"prompts_{texts}.jsonl", work / f"traces_{name}_{texts}"
    run = work / f"run_{name}_{texts}_{profile}_{trunk}"
    whose = [] if model is None else ["--model", str(model)]
    if not prompts.exists():
        vocabulary = read_config(EMBEDDED_MODEL if model is None else model).vocab_size
        write_atomically(prompts, "".join(pieces(work, documents) + random_texts(drawn, tokens, vocabulary)))
    step(
        "huorn.cli", "trace", "record", "--mode", "teacher", "--prompts", str(prompts), "--out", str(traces),
        "--tokens", str(tokens), *whose,
    )  # fmt: skip
    step(
        "huorn.cli", "predictor", "train", "--traces", str(traces), "--out", str(run), "--profile", profile,
        "--trunk", str(trunk), "--epochs", str(epochs), *whose,
    )  # fmt: skip
    step(
        "huorn.cli", "predictor", "release", str(run), "--traces", str(traces), "--out", str(out), "--repo", name,
        "--notice", NOTICE,
    )  # fmt: skip


def random_texts(count: int, tokens: int, vocabulary: int) -> list[str]:
    """JSONL lines of ids, each as likely as any other; the last hundredth of a vocabulary may be special and is left out."""
    random = Random(5)
    each = ([random.randrange(vocabulary * 99 // 100) for _ in range(tokens + 1)] for _ in range(count))
    return [json.dumps({"ids": ids}) + "\n" for ids in each]


def pieces(work: Path, documents: int) -> list[str]:
    """JSONL lines: one piece from the middle of each document, since licences at their heads are all alike."""
    found: list[tuple[str, str]] = []
    for name in ("documents.jsonl", "heldout.jsonl"):
        for line in (work / name).read_text(encoding="utf-8").splitlines():
            text = json.loads(line)["text"]
            start = text.find("\n", max(0, (len(text) - PIECE_CHARACTERS) // 2)) + 1
            piece = text[start : start + PIECE_CHARACTERS]
            if len(piece) >= LEAST_CHARACTERS:
                order = hashlib.sha256(piece.encode()).hexdigest()
                found.append((order, json.dumps({"text": piece}, ensure_ascii=False) + "\n"))
    return [line for _, line in sorted(found)[:documents]]


if __name__ == "__main__":
    typer.run(main)
