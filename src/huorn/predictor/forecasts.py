"""What a bank forecasts for the rows of a trace."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from huorn.predictor.bank_files.reference_scorer import Bank, assemble, base_hidden, calibrated, scores
from huorn.predictor.dataset import load_rows
from huorn.trace.manifest import Split
from huorn.trace.recording import Traces

_ROWS = 4096


def forecasts(
    bank: Bank, traces: Traces, split: Split, prompts: int | None = None
) -> Iterator[tuple[int, Tensor]]:
    """(layer, f16 [N, G, E]) for each head: how likely each expert is used within the next 1, 4, 16 tokens after each row of the
    first `prompts` prompts of a split. Raises TraceError."""
    for number, layer in enumerate(bank.config.heads.layers):
        rows = load_rows(
            traces,
            layer,
            split,
            bank.config.features.ema_beta,
            prompts,
            states=bank.config.base_model.hidden_size > 0,
        )
        one = Bank(
            bank.config,
            {
                name: tensor if name == "token_table" else tensor[number : number + 1]
                for name, tensor in bank.tensors.items()
            },
        )
        parts = []
        for at in torch.arange(len(rows)).split(_ROWS):
            seen = rows.rows(at)
            x = assemble(bank.config.features, [layer], seen, bank.tensors["token_table"])
            parts.append(calibrated(one, scores(one, x, base_hidden([layer], seen)))[:, 0].to(torch.float16))
        yield layer, torch.cat(parts)
