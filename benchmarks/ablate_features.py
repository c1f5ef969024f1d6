"""What each feature of a head is worth: heads trained anew with one thing changed, recall on the validation split.

    python benchmarks/ablate_features.py --traces TRACES [--model DIR] [--layers 1,4,6] [--pool 400] [--epochs 3] [--json FILE]

Variants of profile huorn: each of its three differences from profile card taken back alone, narrower token tables, and each block
of features left out. All on the same rows, with the same seed, one thread per head. The test split is not looked at.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch

from huorn.predictor.bank_files.spec import BLOCKS, FeatureContract
from huorn.predictor.base_model import recorded_embedding
from huorn.predictor.profiles import CARD_WIDTH, token_table
from huorn.predictor.run_folder import RunSpec, TrainSettings
from huorn.predictor.train import make_spec, parse_layers
from huorn.predictor.train_head import HeadTraining
from huorn.trace.recording import Traces


def variants(whole: FeatureContract) -> Iterator[tuple[str, FeatureContract]]:
    """Name and contract."""
    yield "huorn", whole
    drawn = {"token_source": "random", "token_width": CARD_WIDTH}
    yield "random token table of width 32", whole.model_copy(update=drawn)
    yield "position without end", whole.model_copy(update={"position_limit": None})
    yield "expert 0 before the first step", whole.model_copy(update={"first_step": "expert_zero"})
    yield (
        "all three (card)",
        whole.model_copy(update=drawn | {"position_limit": None, "first_step": "expert_zero"}),
    )
    for width in (32, 128):
        if width < whole.token_width:
            yield f"embedding through width {width}", whole.model_copy(update={"token_width": width})
    for block in BLOCKS:
        kept = tuple(one for one in whole.blocks if one != block)
        yield f"without {block}", whole.model_copy(update={"blocks": kept})


def recall(traces: Path, spec: RunSpec, model: Path | None, layer: int) -> tuple[float, float]:
    """Recall@8 and @16 on validation rows of a head trained to its end."""
    torch.set_num_threads(1)
    opened = Traces.open(traces)
    embedded = spec.features.token_source == "embedding"
    table = token_table(spec.features, recorded_embedding(model, opened.manifest) if embedded else ())
    training = HeadTraining(opened, spec, table, layer)
    while not training.finished:
        training.one_step()
    training.finish()
    found = training.validate()[1]
    return found[0], found[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--traces", type=Path, required=True)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--layers", default="1,4,6")
    parser.add_argument("--pool", type=int, default=400)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--trunk", type=int, default=256)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    traces = Traces.open(options.traces)
    settings = TrainSettings(trunk=options.trunk, epochs=options.epochs, pool=options.pool)
    whole = make_spec(traces, "huorn", settings)
    layers = parse_layers(options.layers, whole.base_model.num_layers)
    results: dict[str, dict[str, float]] = {}
    with ProcessPoolExecutor(options.workers, get_context("spawn")) as pool:
        for name, contract in variants(whole.features):
            spec = whole.model_copy(update={"features": contract})
            runs = [pool.submit(recall, options.traces, spec, options.model, layer) for layer in layers]
            found = [run.result() for run in runs]
            eight, sixteen = (sum(values) / len(found) for values in zip(*found, strict=True))
            results[name] = {"recall_8": eight, "recall_16": sixteen}
            print(f"{name:34} @8 {eight:.4f}  @16 {sixteen:.4f}", flush=True)
            if options.json:
                options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
