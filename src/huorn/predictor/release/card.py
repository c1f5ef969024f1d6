"""README.md of a bank, written from what was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from huorn.predictor.bank_files.reference_scorer import Bank
from huorn.predictor.baselines import EQUAL_LEAD, LESS_LEAD
from huorn.predictor.evaluate import PRECISIONS, Evaluation, best_baseline
from huorn.predictor.recall import KS

# A reader runs this inside the folder; tests do too.
SNIPPET = """\
from bank_loader import load
from reference_scorer import probabilities
from safetensors.torch import load_file

cfg, state = load('.')
fixture = load_file('parity_fixture.safetensors')
raw = {k[2:]: v for k, v in fixture.items() if k.startswith('0.') and 'expected' not in k}
p = probabilities(state, raw, cfg.base_model.num_experts, cfg.features.ema_beta)
assert (p == fixture['0.expected_probabilities']).all()  # bitwise on the CPU
"""
_NAMES = {
    "repeat": "repeat token t's experts", "ema": "moving average", "popularity": "popularity",
    "count_table": "table P(expert, id of t+1)", "next_layer_gate": "router on the state one layer below",
}  # fmt: skip


def head_bytes(coded: Mapping[str, Tensor]) -> int:
    """Bytes of one head in int8: codes, scales, biases and calibration."""
    return sum(tensor[0].numel() * tensor.element_size() for tensor in coded.values())


def card_text(bank: Bank, found: Evaluation, coded: Mapping[str, Tensor], notice: str, plotted: bool) -> str:
    """Markdown."""
    config = bank.config
    base, features, heads = config.base_model, config.features, config.heads
    test, name = found.recall["bf16"]["test"], best_baseline(found, EQUAL_LEAD, "test", 8)
    parts = [
        f"# Expert predictor for {base.repo}",
        f"One small head for each of the MoE layers {_ranges(heads.layers)}. When token t has been decoded and token t+1 is "
        f"chosen, each head says how likely each of its layer's {base.num_experts} experts is to be routed to for token t+1, and "
        f"within the next {_words(heads.horizons[1:])} tokens. An engine that keeps experts on disk or in host memory can start "
        "copies from that; the forecast never changes routing, weights or text.",
        f"Made for {base.repo}, revision {base.revision}, and bound to it by the fingerprint `{base.fingerprint}` of its config, "
        "router weights and embedding: a fine-tune of the same shapes has another one, and `check_base` in spec.py refuses it.",
        "## Recall",
        "Recall@K is the share of token t+1's routed experts that are among a head's K most likely ones. The lead is one "
        "token: all "
        f"inputs exist when token t has been decoded. Test rows ({found.rows['test']:,}) were used for nothing else; "
        "validation rows "
        f"({found.rows['validation']:,}) chose when training ended and fitted the calibration. Splits are by prompt, "
        "with exact and near "
        "duplicates kept together.",
        f"Mean recall@8 on the test split: {test['mean']['8']:.3f}, @16: {test['mean']['16']:.3f}. The best baseline of "
        "equal lead "
        f"({_NAMES[name[0]]}) has {name[1]:.3f} at 8.",
        *(["![Recall by layer](recall.png)"] if plotted else []),
        "Test split, BF16, by layer:",
        _table("Layer", [(label, test[label]) for label in test]),
        "Means over all heads:",
        _table(
            "Precision, split",
            [
                (f"{p}, {split}", found.recall[p][split]["mean"])
                for p in PRECISIONS
                for split in found.recall[p]
            ],
        ),
        "Baselines on the test split, fitted on the training split:",
        _table(
            "Baseline",
            [
                (
                    _NAMES[label] + (" (one layer of lead only)" if label in LESS_LEAD else ""),
                    rows["test"]["mean"],
                )
                for label, rows in found.baselines.items()
            ],
        ),
        *_full_windows(found),
        "By position of token t in the answer (test split, BF16):",
        _table("Steps from", [(label, row) for label, row in found.by_position["test"].items()]),
        "With the inputs of one block zeroed (validation split, BF16; not trained anew):",
        _table("Zeroed", [(block, table["mean"]) for block, table in found.without.items()]),
        "## Inputs",
        f"Profile `{features.profile}`: {features.width(base):,} inputs in the order {', '.join(features.blocks)}; "
        "reference_scorer.py "
        f"has each. Token ids go through a frozen table of {features.token_rows:,} rows of {features.token_width} "
        + (
            "random numbers"
            if features.token_source == "random"
            else "numbers: the model's own embedding through one random projection"
        )
        + f" (seed {features.token_seed}); other ids are refused. The first step after a reset follows "
        f"the rule `{features.first_step}`.",
        "Each head also applies a frozen linear map to a forecast of its own layer's next hidden state: a least-squares "
        "fit of the "
        "layer's router from traces, close to the router but not bit-identical to it.",
        f"In int8 (groups of 128 inputs) a head takes {head_bytes(coded) / 1e6:.2f} MB, all {len(heads.layers)} of them "
        f"{len(heads.layers) * head_bytes(coded) / 1e6:.1f} MB.",
        "## Files",
        "model.safetensors has the BF16 bank, calibration in F32; config.json what it is for (schema: spec.py). "
        "bank_loader.py loads and "
        "checks both and makes the int8 bank (`to_int8`, with int8_bank.py); reference_scorer.py assembles features and "
        "scores in plain "
        "PyTorch; parity_fixture.safetensors has nine sets of inputs with what the scorer must give; manifest.json the "
        "SHA-256 of every "
        "file and int8 buffer. Needs Python 3.10 or later, torch, safetensors and Pydantic 2. Run inside this folder:",
        f"```python\n{SNIPPET}```",
        "With huorn installed, `huorn predictor verify .` checks all files and scores again. Other versions of torch and other "
        "processors can differ in the last bit.",
        "## Limits",
        f"Fitted to one model, on traces whose text is not of every kind. Position counts up to "
        f"{features.position_limit or 'any number'}; see the table by position. Text only. The fixture's inputs are "
        "random numbers: "
        "they show that files and scorer are right, not that forecasts are good.",
        "## Data",
        notice,
    ]
    return "\n\n".join(parts) + "\n"


def _table(first: str, rows: Sequence[tuple[str, Mapping[str, float]]]) -> str:
    head = f"| {first} | " + " | ".join(f"@{k}" for k in KS) + " |\n|---|" + "---|" * len(KS)
    lines = [f"| {label} | " + " | ".join(f"{row[str(k)]:.3f}" for k in KS) + " |" for label, row in rows]
    return "\n".join([head, *lines])


def _full_windows(found: Evaluation) -> list[str]:
    some = [str(layer) for layer in found.full_windows]
    if not some or len(some) == len(found.layers):
        return []
    test = found.recall["bf16"]["test"]
    means = {str(k): sum(test[layer][str(k)] for layer in some) / len(some) for k in KS}
    return [
        f"Heads that have all five layers below them that their windows look at ({_ranges(found.full_windows)}), test "
        "split, BF16:",
        _table("Mean", [("full windows", means)]),
    ]


def _ranges(layers: Sequence[int]) -> str:
    """0-7, or 0, 2, 5-7."""
    parts: list[list[int]] = []
    for layer in layers:
        if parts and layer == parts[-1][-1] + 1:
            parts[-1].append(layer)
        else:
            parts.append([layer])
    return ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


def _words(numbers: Sequence[int]) -> str:
    return " and ".join(str(number) for number in numbers)


def draw_recall(found: Evaluation, path: Path) -> bool:
    """Recall@8 and @16 by layer on the test split, with the baselines at 8. False when matplotlib is not there."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.subplots()
    layers = [str(layer) for layer in found.layers]
    test = found.recall["bf16"]["test"]
    axes.plot(
        found.layers, [test[layer]["16"] for layer in layers], "o-", color="C0", alpha=0.5, label="head @16"
    )
    axes.plot(found.layers, [test[layer]["8"] for layer in layers], "o-", color="C0", label="head @8")
    for number, (name, rows) in enumerate(found.baselines.items(), 1):
        there = [layer for layer in layers if layer in rows["test"]]
        axes.plot(
            [int(layer) for layer in there], [rows["test"][layer]["8"] for layer in there], ".--", color=f"C{number}",
            label=f"{_NAMES[name]} @8",
        )  # fmt: skip
    axes.set(xlabel="layer", ylabel="recall, test split", ylim=(0, 1))
    axes.legend(fontsize=8, ncols=2)
    figure.savefig(path, dpi=110)
    return True
