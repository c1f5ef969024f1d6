"""Which tensors a synthetic checkpoint has, what their numbers look like, and in which shard each lies."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod, sqrt

from huorn.checkpoint.config import ModelConfig
from huorn.checkpoint.fp8 import scale_shape
from huorn.checkpoint.names import F8, SCALE_SUFFIX, Layout, expected_tensors
from huorn.synth.numbers import CODE_STD, SHORT_POOL, Values

PREFIX = "model.language_model."
BF16_SHARD_BYTES = 5_000_000_000

_CODES = Values(F8, CODE_STD)
# 1 + w is applied for all norms but the one inside the delta net, whose weight is applied as it is.
_NORM = Values("BF16", 0.1)
_GATED_NORM = Values("F32", 0.05, mean=1.0)
# Decay per token is exp(-exp(A_log) * softplus(a + dt_bias)): with these it halves after 0.5 to 1,000 tokens.
_A_LOG = Values("F32", 0.5)
_DT_BIAS = Values("BF16", 0.8, mean=-3.0)
_EMBEDDING = Values("BF16", 1.0)
_CONVOLUTION = Values("BF16", 0.5)  # four taps of 0.5: variance is kept

ROUTER_GAIN = 1.5
# Standard deviation of a matrix is gain / sqrt(fan in): inputs of RMS 1 give outputs of RMS gain. Residual RMS then
# grows from 1 at the embedding to about 5 after 40 layers. All other matrices have gain 1.
_GAINS = {
    "lm_head.weight": 3.0,  # logits of deviation 3: a peaked but not certain next token
    "mlp.gate.weight": ROUTER_GAIN,  # router: the top 8 of 256 share out 0.05 to 0.4 each
    "linear_attn.in_proj_a.weight": 0.5,  # keeps the decay near what dt_bias says
}


@dataclass(frozen=True)
class Band:
    """A rectangle of a matrix, rows and columns as (first, end), that holds other numbers than the rest."""

    rows: tuple[int, int]
    columns: tuple[int, int]
    values: Values


@dataclass(frozen=True)
class SynthTensor:
    """One tensor to write: name in the file, shape, and its numbers: `values` except in `bands`, which do not overlap."""

    name: str
    shape: tuple[int, ...]
    values: Values
    bands: tuple[Band, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return prod(self.shape) * self.values.itemsize

    @property
    def kinds(self) -> set[Values]:
        """All kinds of numbers in it."""
        return {self.values, *(band.values for band in self.bands)}


def layout(config: ModelConfig) -> Layout:
    """Names as the releases spell them: experts one by one in FP8, fused in BF16."""
    return Layout(PREFIX, fused_experts=not config.fp8)


def text_tensors(config: ModelConfig) -> Iterator[SynthTensor]:
    """Every text tensor with the name it has in the file, each F8 matrix followed by its scales."""
    spelling = layout(config)
    for spec in expected_tensors(config, spelling):
        yield from _stored(spelling.on_disk(spec.name), spec.shape, config.fp8 and F8 in spec.dtypes)


def mtp_tensors(config: ModelConfig) -> Iterator[SynthTensor]:
    """The draft head of the release: one full layer and what feeds it. huorn does not use it, but its bytes are there."""
    d = config.hidden_size
    yield from _stored("mtp.fc.weight", (d, 2 * d), False)
    for norm in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        yield from _stored(f"mtp.{norm}.weight", (d,), False)
    one_layer = config.model_copy(update={"num_hidden_layers": 1, "layer_types": ("full_attention",)})
    for spec in expected_tensors(one_layer, layout(config)):
        if spec.name.startswith("layers."):
            yield from _stored(f"mtp.{spec.name}", spec.shape, config.fp8 and F8 in spec.dtypes)


def shards(config: ModelConfig) -> dict[str, list[SynthTensor]]:
    """File name -> tensors in file order.

    FP8 as the official release: a shard per layer, one for the draft head and one for everything outside of layers.
    BF16: numbered shards of at most 5 GB. Inside a file wider dtypes come first, then names in order, as the
    safetensors library writes them: so the three matrices of an expert lie side by side and its scales elsewhere.
    """
    tensors = [*text_tensors(config), *mtp_tensors(config)]
    named = _shards_by_layer(tensors) if config.fp8 else _shards_by_size(tensors)
    return {file: sorted(group, key=lambda t: (-t.values.itemsize, t.name)) for file, group in named.items()}


def _shards_by_layer(tensors: list[SynthTensor]) -> dict[str, list[SynthTensor]]:
    named: dict[str, list[SynthTensor]] = {}
    for tensor in tensors:
        inside = tensor.name.removeprefix(PREFIX)
        if tensor.name.startswith("mtp."):
            file = "mtp.safetensors"
        elif inside.startswith("layers."):
            file = f"layers-{inside.split('.')[1]}.safetensors"
        else:
            file = "outside.safetensors"
        named.setdefault(file, []).append(tensor)
    return named


def _shards_by_size(tensors: list[SynthTensor]) -> dict[str, list[SynthTensor]]:
    groups: list[list[SynthTensor]] = [[]]
    room = BF16_SHARD_BYTES
    for tensor in tensors:
        if tensor.nbytes > room and groups[-1]:
            groups.append([])
            room = BF16_SHARD_BYTES
        groups[-1].append(tensor)
        room -= tensor.nbytes
    return {
        f"model.safetensors-{n:05}-of-{len(groups):05}.safetensors": group
        for n, group in enumerate(groups, 1)
    }


def _stored(name: str, shape: tuple[int, ...], as_f8: bool) -> Iterator[SynthTensor]:
    """The tensor and, for a matrix in F8, its scales. The embedding and lm_head stay BF16 as in the release."""
    if not as_f8 or name == "lm_head.weight":
        yield _tensor(name, shape, _values(name, shape))
        return
    yield _tensor(name, shape, _CODES)
    scale = _gain(name) / sqrt(shape[-1]) / CODE_STD
    yield _tensor(name + SCALE_SUFFIX, scale_shape(shape), Values("BF16", 0.1 * scale, mean=scale))


def _tensor(name: str, shape: tuple[int, ...], values: Values) -> SynthTensor:
    return SynthTensor(name, shape, replace(values, long=True) if prod(shape) > SHORT_POOL else values)


def _values(name: str, shape: tuple[int, ...]) -> Values:
    fixed = {
        "linear_attn.norm.weight": _GATED_NORM,
        "linear_attn.A_log": _A_LOG,
        "linear_attn.dt_bias": _DT_BIAS,
        "linear_attn.conv1d.weight": _CONVOLUTION,
        "embed_tokens.weight": _EMBEDDING,
    }
    for ending, values in fixed.items():
        if name.endswith(ending):
            return values
    if len(shape) == 1:
        return _NORM
    return Values("BF16", _gain(name) / sqrt(shape[-1]))


def _gain(name: str) -> float:
    return next((gain for ending, gain in _GAINS.items() if name.endswith(ending)), 1.0)
