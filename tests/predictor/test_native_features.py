"""Native features are those of the reference, to the bit, for every block, first steps and bottom layers included."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from huorn import _native
from huorn.kernels.isa import available
from huorn.predictor.bank_files.reference_scorer import Rows, assemble, base_hidden
from huorn.predictor.bank_files.spec import BLOCKS, SCHEMA, BankConfig
from huorn.predictor.native_features import NativeFeatures
from huorn.predictor.profiles import make_contract

LAYERS = 9


def made_config(layers: int, heads: tuple[int, ...], hidden: int, experts: int) -> BankConfig:
    base = {
        "repo": "", "revision": "", "fingerprint": "", "num_layers": layers, "num_experts": experts, "experts_per_token": 3,
        "hidden_size": hidden, "vocab_size": 40,
    }  # fmt: skip
    made = {"traces": "", "run": "", "huorn": "", "torch": "", "training": {}}
    return BankConfig.model_validate(
        {
            "schema": SCHEMA, "base_model": base, "features": make_contract("huorn", 40, hidden),
            "heads": {"layers": heads, "trunk": 128, "horizons": (1, 4, 16)}, "provenance": made,
        }
    )  # fmt: skip


def random_token(config: BankConfig, seed: int, step: int) -> dict[str, torch.Tensor | None]:
    """Values of every size, some beyond F16, some below its normal numbers."""
    base, heads = config.base_model, len(config.heads.layers)
    g = torch.Generator().manual_seed(seed)

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g) * torch.exp2(
            torch.randint(-26, 12, shape, generator=g).float()
        )

    def ids() -> torch.Tensor:
        each = [
            torch.randperm(base.num_experts, generator=g)[: base.experts_per_token]
            for _ in range(base.num_layers)
        ]
        return torch.stack(each).int()

    return {
        "hidden": values(base.num_layers, base.hidden_size), "logits": values(base.num_layers, base.num_experts),
        "routed": ids(), "previous": ids() if step else None, "prior": torch.rand(heads, base.num_experts, generator=g),
        "rows": torch.randn(2, config.features.token_width, generator=g).bfloat16(),
    }  # fmt: skip


@pytest.mark.parametrize("isa", available())
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_bits_are_those_of_the_reference(isa: str, data: st.DataObject) -> None:
    draw = data.draw
    blocks = tuple(draw(st.lists(st.sampled_from(BLOCKS), min_size=1, unique=True)))
    heads = tuple(sorted(draw(st.sets(st.integers(0, LAYERS - 1), min_size=1))))
    config = made_config(LAYERS, heads, draw(st.sampled_from([1, 16, 33, 130])), 24)
    features = config.features.model_copy(
        update={
            "blocks": blocks, "first_step": draw(st.sampled_from(["none", "expert_zero"])),
            "position_limit": draw(st.sampled_from([None, 3])),
            "uncaptured_logits": tuple(sorted(draw(st.sets(st.integers(0, LAYERS - 1), max_size=3)))),
        }
    )  # fmt: skip
    config = config.model_copy(update={"features": features})
    step = draw(st.integers(0, 400))
    seen = random_token(config, draw(st.integers(0, 9999)), step)
    native = NativeFeatures(config, _native.Runtime(draw(st.integers(1, 2)), isa))
    rows = seen.pop("rows")
    assert rows is not None
    native.assemble(**seen, step=step, rows=(rows[0].contiguous(), rows[1].contiguous()))  # type: ignore[arg-type]
    every, previous = range(LAYERS), seen["previous"]
    assert seen["routed"] is not None
    assert seen["hidden"] is not None
    assert seen["logits"] is not None
    assert seen["prior"] is not None
    one = Rows(
        layers=every, hidden_layers=every, hidden=seen["hidden"].half()[None], router_logits=seen["logits"].half()[None],
        routed=seen["routed"][None], previous=(torch.full_like(seen["routed"], -1) if previous is None else previous)[None],
        prior=seen["prior"][None], step=torch.tensor([step]), token=torch.tensor([0]), next_token=torch.tensor([1]),
    )  # fmt: skip
    want, base = assemble(features, heads, one, rows)[0], base_hidden(heads, one)[0].bfloat16()
    for mine, theirs in ((native.x, want), (native.base, base)):
        finite = ~theirs.isnan()  # infinity less infinity
        assert torch.equal(mine.isnan(), theirs.isnan())
        assert torch.equal(mine[finite], theirs[finite])  # but for the sign of zeros


def test_every_number_is_rounded_to_f16_as_torch_does() -> None:
    """All F16 numbers, what lies halfway between them, and their neighbours in F32."""
    half = torch.arange(0, 0x7C00, dtype=torch.int16).view(torch.float16).float()
    middle = (half[1:] + half[:-1]) / 2
    around = torch.cat([half, middle, torch.tensor([65519.996, 65520.0, 1e30, torch.inf])])
    around = torch.cat(
        [around, torch.nextafter(around, torch.tensor(torch.inf)), torch.nextafter(around, torch.tensor(0.0))]
    )
    around = torch.cat([around, -around])
    config = made_config(1, (0,), len(around), 8)
    features = config.features.model_copy(update={"blocks": ("h",)})
    config = config.model_copy(update={"features": features})
    seen = random_token(config, 0, 0)
    seen["hidden"] = around[None].contiguous()
    rows = seen.pop("rows")
    assert rows is not None
    for isa in available():
        native = NativeFeatures(config, _native.Runtime(1, isa))
        native.assemble(**seen, step=0, rows=(rows[0].contiguous(), rows[1].contiguous()))  # type: ignore[arg-type]
        assert torch.equal(native.x[0].view(torch.int16), around.half().bfloat16().view(torch.int16)), isa
