"""How well a bank forecasts: recall@K by precision, split and layer, beside what is known without it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from huorn.errors import UsageError
from huorn.predictor.bank_files.bank_loader import to_int8
from huorn.predictor.bank_files.int8_bank import GROUP
from huorn.predictor.bank_files.reference_scorer import Bank, assemble, base_hidden
from huorn.predictor.bank_files.spec import PREVIOUS_WINDOW, Block
from huorn.predictor.baselines import baselines
from huorn.predictor.dataset import HeadRows, load_rows
from huorn.predictor.recall import KS, hits_at
from huorn.trace.manifest import Split
from huorn.trace.recording import Traces

PRECISIONS = ("f32", "bf16", "int8")
SPLITS: tuple[Split, ...] = ("validation", "test")
# Steps of an answer from which recall is told apart: the published bank was trained on 256.
POSITIONS = (0, 16, 64, 256)
_ROWS = 4096

ByK = dict[str, float]  # "8" -> recall@8
ByLayer = dict[str, ByK]  # layer, or "mean"


@dataclass
class Evaluation:
    """recall[precision][split][layer][K]; baselines[name][split][layer][K]; by_position[split][from step][K] of the bf16 bank,
    over all layers; without[block][layer][K] on validation rows with the inputs of that block zeroed; int8 and rows of splits."""

    profile: str
    layers: list[int]
    full_windows: list[int]  # layers that have all the layers below that their features look at
    forced: str | None = None  # that the traces are of another model
    rows: dict[str, int] = field(default_factory=dict)
    recall: dict[str, dict[str, ByLayer]] = field(default_factory=dict)
    baselines: dict[str, dict[str, ByLayer]] = field(default_factory=dict)
    by_position: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)
    without: dict[str, ByLayer] = field(default_factory=dict)


def evaluate(
    bank: Bank,
    full: Mapping[str, Tensor] | None,
    traces: Traces,
    report: Callable[[int, int], None],
    force: bool = False,
) -> Evaluation:
    """Scores every head on the validation and the test split. `full` are F32 weights of the heads; without them f32 means the
    BF16 weights with F32 arithmetic. Raises TraceError; UsageError when the traces are of a model of other shapes, or of other
    weights and not `force`."""
    forced = check_traces(bank, traces, force)
    config = bank.config
    layers = list(config.heads.layers)
    full_windows = [layer for layer in layers if layer >= PREVIOUS_WINDOW]
    found = Evaluation(config.features.profile, layers, full_windows, forced)
    weights: dict[str, Mapping[str, Tensor]] = {
        "f32": full or _floats(bank.tensors), "bf16": bank.tensors, "int8": _from_int8(bank)
    }  # fmt: skip
    positions: dict[str, dict[str, list[Tensor]]] = {split: {} for split in SPLITS}
    for number, layer in enumerate(layers):
        train = load_rows(traces, layer, "train", config.features.ema_beta, routing_only=True)
        router = weights["f32"]["w_router"][number], weights["f32"]["b_router"][number]
        for split in SPLITS:
            rows = load_rows(
                traces, layer, split, config.features.ema_beta, states=config.base_model.hidden_size > 0
            )
            found.rows[split] = len(rows.usable)
            for name, forecast in baselines(train, rows, router).items():
                parts = [hits_at(forecast(at), rows.routed_next(at)) for at in rows.usable.split(_ROWS)]
                _put(found.baselines.setdefault(name, {}).setdefault(split, {}), layer, torch.cat(parts))
            zeroed = config.features.blocks if split == "validation" else ()
            by_precision, by_block = _hits(bank, weights, number, rows, zeroed)
            for precision, hits in by_precision.items():
                _put(found.recall.setdefault(precision, {}).setdefault(split, {}), layer, hits)
            _by_position(positions[split], rows.step[rows.usable], by_precision["bf16"])
            for block, hits in by_block.items():
                _put(found.without.setdefault(block, {}), layer, hits)
        report(number + 1, len(layers))
    for split in SPLITS:
        found.by_position[split] = {
            name: _means(torch.cat(parts)) | {"rows": float(sum(map(len, parts)))}
            for name, parts in positions[split].items()
        }
    for table in [
        *(part[split] for part in (*found.recall.values(), *found.baselines.values()) for split in part),
        *found.without.values(),
    ]:
        table["mean"] = {
            k: sum(row[k] for row in table.values()) / len(table) for k in next(iter(table.values()))
        }
    return found


def check_traces(bank: Bank, traces: Traces, force: bool) -> str | None:
    """What to say where the traces are of another model than the bank's and this was forced. UsageError when they are and it was
    not, or they do not hold what the bank reads."""
    base, model = bank.config.base_model, traces.manifest.model
    if (
        model.layers != base.num_layers
        or model.experts != base.num_experts
        or model.top_k != base.experts_per_token
    ):
        raise UsageError(
            f"the bank is for {base.num_layers} layers and {base.experts_per_token} of {base.num_experts} experts, the traces "
            f"have {model.layers} and {model.top_k} of {model.experts}"
        )
    missing = {"h": "hidden", "hd": "hidden", "rl": "logits"}
    for block in bank.config.features.blocks:
        if missing.get(block, "ids") not in traces.manifest.captured:
            raise UsageError(
                f"the bank reads {missing[block]} of each layer, which {traces.folder} does not have"
            )
    if (model.fingerprint or "") == base.fingerprint:
        return None
    words = (
        f"the bank is for {base.repo} with fingerprint {base.fingerprint or 'none'}, the traces are of {model.name} with "
        f"{model.fingerprint or 'none'}"
    )
    if not force:
        raise UsageError(f"{words}: record traces of the bank's model, or give --force")
    return words


def _floats(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.float() for name, value in tensors.items()}


def _from_int8(bank: Bank) -> dict[str, Tensor]:
    """F32 tensors with the values that the int8 bank multiplies with."""
    coded = to_int8(bank)
    found = {name: coded[name] for name in ("b_in", "b_out", "b_router")}
    for name in ("w_in", "w_out", "w_router"):
        codes, scale = coded[f"{name}.codes"].float().unflatten(-1, (-1, GROUP)), coded[f"{name}.scale"]
        found[name] = (codes * scale[..., None]).flatten(-2)[..., : bank.tensors[name].shape[-1]]
    return found


def head_scores(
    weights: Mapping[str, Tensor], precision: str, head: int, x: Tensor, base: Tensor, groups: int
) -> Tensor:
    """F32 [R, G, E] of one head in one precision: bf16 as reference_scorer.scores; int8 the same roundings with products and
    biases in F32; f32 without roundings."""
    low = torch.float32 if precision == "f32" else torch.bfloat16

    def linear(name: str, inputs: Tensor) -> Tensor:
        weight, bias = weights[f"w_{name}"][head], weights[f"b_{name}"][head]
        if precision == "bf16":
            return F.linear(inputs, weight, bias)
        return F.linear(inputs.float(), weight, bias).to(low)

    experts = weights["w_router"].shape[1]
    u = F.silu(linear("in", x.to(low)).float()).to(low)
    both = linear("out", u)
    routed = linear("router", base.to(low) + both[:, groups * experts :]).float()
    direct: Tensor = both[:, : groups * experts].float().unflatten(1, (groups, experts))
    return direct + routed[:, None]


def _hits(
    bank: Bank,
    weights: Mapping[str, Mapping[str, Tensor]],
    head: int,
    rows: HeadRows,
    zeroed: Sequence[Block],
) -> tuple[dict[str, Tensor], dict[Block, Tensor]]:
    """hits_at of the next token's group by precision, and in BF16 with the inputs of each block of `zeroed` at 0."""
    features, groups = bank.config.features, len(bank.config.heads.horizons)
    widths = [features.block_width(block, bank.config.base_model) for block in features.blocks]
    by_precision: dict[str, list[Tensor]] = {precision: [] for precision in PRECISIONS}
    by_block: dict[Block, list[Tensor]] = {block: [] for block in zeroed}
    for at in rows.usable.split(_ROWS):
        seen, routed = rows.rows(at), rows.routed_next(at)
        x = assemble(features, [rows.layer], seen, bank.tensors["token_table"])[:, 0]
        base = base_hidden([rows.layer], seen)[:, 0]
        for precision, parts in by_precision.items():
            z = head_scores(weights[precision], precision, head, x, base, groups)
            parts.append(hits_at(z[:, 0], routed))
        for block, parts in by_block.items():
            part = x.split(widths, 1)[features.blocks.index(block)]
            kept = part.clone()
            part.zero_()
            parts.append(hits_at(head_scores(weights["bf16"], "bf16", head, x, base, groups)[:, 0], routed))
            part.copy_(kept)
    return (
        {precision: torch.cat(parts) for precision, parts in by_precision.items()},
        {block: torch.cat(parts) for block, parts in by_block.items()},
    )


def _put(table: ByLayer, layer: int, hits: Tensor) -> None:
    table[str(layer)] = _means(hits)


def _means(hits: Tensor) -> dict[str, float]:
    return {str(k): float(value) for k, value in zip(KS, hits.double().mean(0), strict=True)}


def _by_position(found: dict[str, list[Tensor]], steps: Tensor, hits: Tensor) -> None:
    for first, last in zip(POSITIONS, (*POSITIONS[1:], 1 << 40), strict=True):
        inside = (steps >= first) & (steps < last)
        if bool(inside.any()):
            found.setdefault(f"{first}+", []).append(hits[inside])


def best_baseline(found: Evaluation, names: Sequence[str], split: Split, k: int) -> tuple[str, float]:
    """The name and mean recall@k of the best of some baselines."""
    there = [
        (found.baselines[name][split]["mean"][str(k)], name) for name in names if name in found.baselines
    ]
    best, name = max(there)
    return name, best
