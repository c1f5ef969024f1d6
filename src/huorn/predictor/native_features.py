"""A token's features for all heads in one native call: the bits of reference_scorer.assemble (native/predictor_features.h)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from huorn import _native
from huorn.predictor.bank_files.spec import BLOCKS, BankConfig


class NativeFeatures:
    """Buffers for one token at a time, and the call that fills them."""

    def __init__(self, config: BankConfig, runtime: _native.Runtime) -> None:
        """For the heads of a bank."""
        base, features, heads = config.base_model, config.features, config.heads.layers
        self._runtime, self._contract = runtime, features
        silent = [int(layer in features.uncaptured_logits) for layer in range(base.num_layers)]
        self._arrays = [
            torch.tensor(values, dtype=torch.int32)
            for values in (heads, [BLOCKS.index(block) for block in features.blocks], silent)
        ]
        self._first = torch.zeros(base.num_layers, base.experts_per_token, dtype=torch.int32)
        self._what = _native.HeadFeatures(
            heads=self._arrays[0].data_ptr(), blocks=self._arrays[1].data_ptr(), no_logits=self._arrays[2].data_ptr(),
            head_count=len(heads), block_count=len(features.blocks), hidden=base.hidden_size, experts=base.num_experts,
            top_k=base.experts_per_token, table_width=features.token_width, inputs=features.width(base),
        )  # fmt: skip
        self.x = torch.zeros(len(heads), features.width(base), dtype=torch.bfloat16)
        self.base = torch.zeros(len(heads), base.hidden_size, dtype=torch.bfloat16)

    def assemble(
        self, hidden: Tensor, logits: Tensor, routed: Tensor, previous: Tensor | None, prior: Tensor, step: int,
        rows: Sequence[Tensor],
    ) -> None:  # fmt: skip
        """Fills `x` bf16 [H, F] and `base` bf16 [H, D].

        hidden f32 [L, D] is what routers read, logits f32 [L, E], routed and previous i32 [L, K] (None: there was none), prior
        f32 [H, E] after this token, step its decode step, rows bf16 [W] of its id and the next one's in the token table. All
        contiguous, of these dtypes.
        """
        limit = self._contract.position_limit
        position = (step + 1 if limit is None else min(step + 1, limit)) / self._contract.position_scale
        if previous is None and self._contract.first_step == "expert_zero":
            previous = self._first
        self._runtime.head_features(
            self._what, hidden.data_ptr(), logits.data_ptr(), routed.data_ptr(), 0 if previous is None else previous.data_ptr(),
            prior.data_ptr(), rows[0].data_ptr(), rows[1].data_ptr(), position,
            self.x.data_ptr(), self.base.data_ptr(),
        )  # fmt: skip
