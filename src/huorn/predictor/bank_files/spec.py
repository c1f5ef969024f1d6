"""What config.json of an expert-predictor bank says, and whether a base model is the one that the bank was made for."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

SCHEMA = "huorn expert predictor v1"
Block = Literal["h", "win", "prior", "pos", "rl", "prevwin", "hd", "sticky", "tokens"]
BLOCKS: tuple[Block, ...] = ("h", "win", "prior", "pos", "rl", "prevwin", "hd", "sticky", "tokens")
WINDOW, PREVIOUS_WINDOW = 3, 5  # layers below that `win` and `rl`, and `prevwin`, look at

PRINTABLE = r"^[^\x00-\x1f\x7f]*$"  # they stand in the card
MOST_HORIZON = 4096  # tokens

Count = Annotated[int, Field(ge=1)]
Size = Annotated[int, Field(ge=0)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class BaseModelShape(_Strict):
    """The model whose routing the bank forecasts. `fingerprint` is sha256 of its config, router weights and embedding."""

    repo: Annotated[str, Field(pattern=PRINTABLE)]
    revision: Annotated[str, Field(pattern=PRINTABLE)]
    fingerprint: str
    num_layers: Count
    num_experts: Count
    experts_per_token: Count
    hidden_size: Size  # 0 for a bank of routing alone
    vocab_size: Size


class FeatureContract(_Strict):
    """What a head sees at the end of token t, block after block in this order (reference_scorer.py assembles it)."""

    profile: Literal["card", "huorn", "routing"]
    blocks: tuple[Block, ...]
    ema_beta: float = Field(gt=0, lt=1)
    position_scale: Count
    # (decode step + 1) counts up to this; None: without end.
    position_limit: Count | None
    token_source: Literal["random", "embedding"]
    token_rows: Size
    token_width: Size
    token_seed: int
    # What stands for the previous token's experts at the first step after a reset: nothing, or expert 0 everywhere.
    first_step: Literal["none", "expert_zero"]
    uncaptured_logits: tuple[int, ...]  # layers whose router logits are zeros

    def block_width(self, block: Block, base: BaseModelShape) -> int:
        """Inputs of one block."""
        experts, hidden = base.num_experts, base.hidden_size
        return {
            "h": hidden, "win": WINDOW * experts, "prior": experts, "pos": 1, "rl": WINDOW * experts,
            "prevwin": PREVIOUS_WINDOW * experts, "hd": hidden, "sticky": experts, "tokens": 2 * self.token_width,
        }[block]  # fmt: skip

    def width(self, base: BaseModelShape) -> int:
        """Inputs of a head."""
        return sum(self.block_width(block, base) for block in self.blocks)


class HeadShape(_Strict):
    """All heads have one shape: a trunk of `trunk` units, and a group of outputs per horizon in tokens."""

    layers: tuple[Annotated[int, Field(ge=0)], ...]
    trunk: Annotated[int, Field(ge=1)]
    horizons: tuple[Count, ...]


class Provenance(_Strict):
    """Where the bank comes from: sha256 of what it was made of, and what the training was told."""

    traces: str
    run: str
    huorn: str
    torch: str
    training: dict[str, str | int | float | None]


class BankConfig(_Strict):
    """config.json."""

    schema_: Literal["huorn expert predictor v1"] = Field(alias="schema")
    base_model: BaseModelShape
    features: FeatureContract
    heads: HeadShape
    provenance: Provenance

    @model_validator(mode="after")
    def _fits(self) -> BankConfig:
        layers = self.heads.layers
        if not layers or list(layers) != sorted(set(layers)) or layers[-1] >= self.base_model.num_layers:
            raise ValueError("heads.layers must ascend and lie inside the model")
        if list(self.heads.horizons) != sorted(set(self.heads.horizons)) or self.heads.horizons[:1] != (1,):
            raise ValueError("heads.horizons must ascend from 1")
        if len(set(self.features.blocks)) != len(self.features.blocks) or not self.features.blocks:
            raise ValueError("features.blocks must name each block once")
        if self.base_model.experts_per_token > self.base_model.num_experts:
            raise ValueError("base_model.experts_per_token are more than num_experts")
        if self.heads.horizons[-1] > MOST_HORIZON:
            raise ValueError(f"heads.horizons must not pass {MOST_HORIZON} tokens")
        if any(not 0 <= layer < self.base_model.num_layers for layer in self.features.uncaptured_logits):
            raise ValueError("features.uncaptured_logits names a layer that the model does not have")
        if self.features.token_rows > self.base_model.vocab_size:
            raise ValueError("features.token_rows are more than the vocabulary has")
        return self


def check_base(config: BankConfig, base: BaseModelShape) -> None:
    """Raises ValueError when `base` is not the model of the bank: shapes first, then the fingerprint, which tells a fine-tune."""
    want, have = config.base_model, base
    for name in ("num_layers", "num_experts", "experts_per_token", "hidden_size", "vocab_size"):
        if getattr(want, name) != getattr(have, name):
            raise ValueError(
                f"the bank was made for a model with {name} {getattr(want, name)}, this one has {getattr(have, name)}"
            )
    if want.fingerprint != have.fingerprint:
        raise ValueError(
            f"the bank was made for {want.repo} with fingerprint {want.fingerprint}, this model has {have.fingerprint}: same "
            "shapes, other weights"
        )
