"""Whether prompts of a benchmark are in a training pool: exact copies, and near ones by shared runs of eight words.

    python benchmarks/check_prompts.py --prompts benchmarks/prompts.jsonl --pool TEXTS.jsonl

A prompt is near a text when half of its own runs of eight words are in it. The pool has {"text": "..."} on each line, as
training.prepare and training.make_bank write them.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

from huorn.commands.bench_pairs import read_prompts
from huorn.trace.shingles import text_shingles

NEAR = 0.5


def check(prompts: list[str], pool: Path) -> tuple[int, list[float]]:
    """Exact copies, and of each prompt the largest share of its runs that one text has."""
    shingles = [text_shingles(prompt) for prompt in prompts]
    exact, most = 0, [0.0] * len(prompts)
    for line in pool.read_text(encoding="utf-8").splitlines():
        text = json.loads(line)["text"]
        own = text_shingles(text)
        for number, (prompt, runs) in enumerate(zip(prompts, shingles, strict=True)):
            exact += prompt.strip() in text
            share = float(np.isin(runs, own, assume_unique=True).mean())
            most[number] = max(most[number], share)
    return exact, most


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--pool", type=Path, required=True)
    options = parser.parse_args()
    prompts = read_prompts(options.prompts)
    exact, most = check(prompts, options.pool)
    near = sum(share >= NEAR for share in most)
    print(
        f"{len(prompts)} prompts: {exact} exact copies, {near} near ones; the nearest shares {100 * max(most):.0f} % of its runs"
    )


if __name__ == "__main__":
    main()
