"""What one head learns from: the rows of traces with the layers that it reads, and which experts came next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from huorn.errors import TraceError
from huorn.predictor.bank_files.reference_scorer import Rows, multi_hot, update_prior
from huorn.predictor.bank_files.spec import PREVIOUS_WINDOW
from huorn.trace.layout import Captured
from huorn.trace.manifest import Split
from huorn.trace.recording import PromptRows, Traces


@dataclass(frozen=True, eq=False)
class HeadRows:
    """All rows of one split for the head of `layer`, prompt after prompt; N rows.

    `layers` are L - 5 .. L as far as they exist, `hidden_layers` L - 1 and L. hidden f16 [N, S', D], logits f16 [N, S, E], ids
    i16 [N, S, K], prior f32 [N, E] after each row's token, step, token, next_token i64 [N]; `end` i64 [N] is the last row of
    each row's prompt. D, or E of logits, is 0 where traces do not have them.
    """

    layer: int
    experts: int
    layers: Sequence[int]
    hidden_layers: Sequence[int]
    hidden: Tensor
    logits: Tensor
    ids: Tensor
    prior: Tensor
    step: Tensor
    token: Tensor
    next_token: Tensor
    end: Tensor

    def __len__(self) -> int:
        return len(self.end)

    @cached_property
    def usable(self) -> Tensor:
        """i64: rows whose next token was recorded too."""
        return torch.nonzero(torch.arange(len(self)) < self.end)[:, 0]

    def rows(self, at: Tensor) -> Rows:
        """What a scorer sees of rows `at`, i64 [R]."""
        previous = self.ids[(at - 1).clamp(min=0)]
        previous = torch.where((self.step[at] == 0)[:, None, None], -1, previous)
        return Rows(
            layers=self.layers, hidden_layers=self.hidden_layers, hidden=self.hidden[at], router_logits=self.logits[at],
            routed=self.ids[at], previous=previous, prior=self.prior[at][:, None], step=self.step[at], token=self.token[at],
            next_token=self.next_token[at],
        )  # fmt: skip

    def targets(self, at: Tensor, horizons: Sequence[int]) -> Tensor:
        """f32 [R, G, E]: 1 for experts that this layer used within the next 1, 4, 16 tokens, as far as the prompt goes."""
        ahead = torch.arange(1, max(horizons) + 1)
        used = self.ids[:, -1][torch.minimum(at[:, None] + ahead, self.end[at][:, None])]  # [R, most, K]
        return torch.stack([multi_hot(used[:, :count].flatten(1), self.experts) for count in horizons], 1)

    def routed_next(self, at: Tensor) -> Tensor:
        """i64 [R, K]: the experts of token t+1."""
        return self.ids[at + 1, -1].long()


def load_rows(
    traces: Traces,
    layer: int,
    split: Split,
    beta: float,
    pool: int | None = None,
    routing_only: bool = False,
    states: bool = True,
) -> HeadRows:
    """Reads the layers that the head of `layer` needs, of the first `pool` prompts of a split; with `routing_only` the experts of
    that layer and no states, which is a tenth of the bytes. Without `states` hidden has D = 0, for banks that read none.

    Raises TraceError when no prompt of the split has two rows, or a value is NaN or infinite.
    """
    prompts = traces.split(split)[:pool]
    if not any(prompt.count > 1 for prompt in prompts):
        raise TraceError(
            f"{traces.folder} has no prompt of 2 or more rows in its {split} split: record more prompts"
        )
    layers = [layer] if routing_only else list(range(max(0, layer - PREVIOUS_WINDOW), layer + 1))
    hidden_layers = [] if routing_only else list(range(max(0, layer - 1), layer + 1))
    reader = _Reader(traces, prompts)
    ids = reader.field(layers, "ids")
    counts = torch.tensor([prompt.count for prompt in prompts])
    rows = np.concatenate(
        [prompt.chunk.rows[prompt.first : prompt.first + prompt.count] for prompt in prompts]
    )
    step, token, next_token = (
        torch.from_numpy(rows[name].astype(np.int64)) for name in ("step", "id", "next_id")
    )
    experts = traces.manifest.model.experts
    wrong = (ids < 0) | (ids >= experts)
    if bool(wrong.any()) or (
        "hidden" in traces.manifest.captured and bool(((token < 0) | (next_token < 0)).any())
    ):
        what = f"an expert that is none of {experts}" if bool(wrong.any()) else "a token id below 0"
        raise TraceError(
            f"{traces.folder} holds {what} in its {split} split: it is damaged; huorn trace show --verify names the file"
        )
    return HeadRows(
        layer=layer, experts=experts, layers=layers, hidden_layers=hidden_layers,
        hidden=reader.values(hidden_layers, "hidden", states), ids=ids,
        logits=reader.values([] if routing_only else layers, "logits"),
        prior=_priors(ids[:, -1], counts, experts, beta), step=step, token=token, next_token=next_token,
        end=torch.repeat_interleave(counts.cumsum(0) - 1, counts),
    )  # fmt: skip


class _Reader:
    """Fields of the rows of some prompts, one after the other."""

    def __init__(self, traces: Traces, prompts: Sequence[PromptRows]) -> None:
        self._traces = traces
        self._runs = [  # prompts that lie side by side in one chunk are read together
            (
                chunk,
                np.concatenate([np.arange(prompt.first, prompt.first + prompt.count) for prompt in group]),
            )
            for chunk, group in groupby(prompts, key=lambda prompt: prompt.chunk)
        ]

    def field(self, layers: Sequence[int], name: Captured) -> Tensor:
        """[N, S, n]."""
        return torch.cat(
            [
                torch.from_numpy(np.stack([chunk.layer(layer)[name][rows] for layer in layers], 1))
                for chunk, rows in self._runs
            ]
        )

    def values(self, layers: Sequence[int], name: Captured, wanted: bool = True) -> Tensor:
        """f16 [N, S, n]; n is 0 where the traces do not have the field."""
        if name not in self._traces.manifest.captured or not (layers and wanted):
            return torch.zeros(sum(len(rows) for _, rows in self._runs), len(layers), 0, dtype=torch.float16)
        values = self.field(layers, name)
        wrong = ~values.isfinite().all(2)
        if wrong.any():
            row, layer = torch.nonzero(wrong)[0].tolist()
            raise TraceError(
                f"{self._traces.folder} holds NaN or infinity in {name} of layer {layers[layer]}, in row {row} of the split; "
                "huorn trace show --verify names the file"
            )
        return values


def _priors(ids: Tensor, counts: Tensor, experts: int, beta: float) -> Tensor:
    """f32 [N, E] after each row, from 0 at the start of each prompt; all prompts together, step by step."""
    out = torch.empty(len(ids), experts)
    first, prior = counts.cumsum(0) - counts, torch.zeros(len(counts), experts)
    for step in range(int(counts.max())):
        going = torch.nonzero(counts > step)[:, 0]
        prior[going] = update_prior(prior[going], ids[first[going] + step], beta)
        out[first[going] + step] = prior[going]
    return out
