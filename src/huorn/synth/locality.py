"""Weights that make consecutive tokens route alike, as in trained models: the option --overlap.

Two blocks of 128 of the residual stream's dimensions are kept for what follows; nothing else writes to them:

* **popular** (the first block): 1 in every embedding row. What a router reads there is the same for every token, so that some
  experts are wanted more often than others.
* **slow** (the second): written by the delta net of layer 0 alone. Its queries, keys and gates read the popular block only, so
  they are the same for every token (and queries equal keys), and the delta rule becomes a running mean of values,
  S k -> KEPT * S k + (1 - KEPT) * v: the next token's is nearly the same, and little is left of it after 50 tokens.
* **fresh** (all the rest): what it is without the option, nearly another direction for every token.

The columns of each router are scaled so that the three blocks have chosen shares in the variance of its logits, which stays what
it is without the option. The logits of consecutive tokens then correlate by about popular + KEPT * slow; overlap is a function
of that correlation. It comes about whatever the tokens are, drawn or given.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import log, sqrt

from huorn.checkpoint.config import ModelConfig
from huorn.checkpoint.fp8 import BLOCK
from huorn.checkpoint.names import SCALE_SUFFIX
from huorn.errors import UsageError
from huorn.synth.numbers import CODE_STD
from huorn.synth.tensors import PREFIX, ROUTER_GAIN, Band, SynthTensor

LOWEST, HIGHEST = 0.2, 0.6
# Overlap -> slow share of the variance of a router's logits. Measured on four layers of the 35B shape with 12 x 48 tokens, two
# seeds each: 0.168 and 0.169, 0.234 and 0.264, 0.334 and 0.359, 0.454 and 0.482, 0.631 and 0.641. With 8 and 40 layers, whose
# fresh dimensions are a little alike too, it is 0.01 to 0.02 more, of which half is in the table.
SLOW_SHARE = {0.178: 0.35, 0.257: 0.5, 0.357: 0.65, 0.478: 0.78, 0.646: 0.9}
# With 0.10 the hottest quarter had 0.69 of use at an overlap of 0.4, with this 0.63; trained models 0.5 to 0.6 over long texts.
POPULAR_SHARE = 0.06
# Half of a token's part is gone after 11 tokens. A longer memory fills too slowly for short decodes, and with a shorter one
# consecutive tokens can not be alike enough for 0.6, which takes a correlation of 0.9.
KEPT = 0.94

# Root mean square of the slow block once the running mean has filled: 0.89 to 0.99 over six seeds. With random queries and keys,
# which are alike to a degree that chance decides, it was 0.80 to 1.0.
SLOW_RMS = 0.93
# Mean square of the fresh dimensions where layer n routes is 1 + this * n, as measured at layer 1 (1.58).
FRESH_GROWTH = 0.6

# What layer 0 has besides. Small values, since silu makes their mean positive, and the mean is what a running mean keeps: at 0.2
# a third of the slow block was the same for every token, at 0.1 a tenth.
_VALUE_GAIN = 0.1
_SLOW_GAIN = 2.5  # for SLOW_RMS near 1
_DT_BIAS_MEAN = -7.0  # memory is lost to new values alone, not to decay
# What must not be read or written is scaled down by this; no release has blocks of scale 0.
_FAINT = 2.0**-12

_FIRST_MIXER = "layers.0.linear_attn."
_WRITERS = tuple(f"{part}_proj.weight{SCALE_SUFFIX}" for part in (".o", "out", "down"))


def check_overlap(overlap: float, preset: str, config: ModelConfig) -> None:
    """Raises UsageError when `overlap` is not from LOWEST to HIGHEST, or the preset has not the blocks that this needs."""
    if not LOWEST <= overlap <= HIGHEST:  # NaN is not either
        raise UsageError(f"--overlap {overlap} is out of range; give {LOWEST} to {HIGHEST}")
    widths = (config.hidden_size, 2 * config.key_dim, config.value_dim)
    if not config.fp8 or any(width % BLOCK for width in widths) or config.hidden_size < 4 * BLOCK:
        raise UsageError(f"--overlap can not be had with --preset {preset}; use qwen3.5-35b-a3b-fp8")


def slow_share(overlap: float) -> float:
    """The slow share that gives `overlap`: between the points of SLOW_SHARE in straight lines."""
    for (low, before), (high, after) in pairwise(SLOW_SHARE.items()):
        if overlap <= high:
            return before + (after - before) * (overlap - low) / (high - low)
    raise ValueError(f"overlap {overlap} is above {HIGHEST}")


def localised(tensor: SynthTensor, config: ModelConfig, slow: float) -> SynthTensor:
    """The tensor as it is where the slow block has the share `slow` in the routers' logits; most are as without."""
    name = tensor.name.removeprefix(PREFIX)
    if name == "embed_tokens.weight":
        ones, zeros = replace(tensor.values, std=0.0, mean=1.0), replace(tensor.values, std=0.0)
        everywhere = (0, tensor.shape[0])
        bands = Band(everywhere, (0, BLOCK), ones), Band(everywhere, (BLOCK, 2 * BLOCK), zeros)
        return replace(tensor, bands=bands)
    if name.startswith("mtp."):
        return tensor
    if name.startswith(_FIRST_MIXER):
        return _first_mixer(tensor, name.removeprefix(_FIRST_MIXER), config)
    if name.endswith("mlp.gate.weight"):
        return _router(tensor, int(name.split(".")[1]), slow)
    if name.endswith(_WRITERS):
        return replace(tensor, bands=(_band(tensor, (0, 2), (0, tensor.shape[1]), _FAINT),))
    return tensor


def _router(tensor: SynthTensor, layer: int, slow: float) -> SynthTensor:
    """Scales columns so that each block has its share of the variance of logits, behind a norm over all of them."""
    rows, columns = tensor.shape
    widths = (BLOCK, BLOCK, columns - 2 * BLOCK)  # popular, slow, fresh
    shares = (POPULAR_SHARE, slow, 1.0 - POPULAR_SHARE - slow)
    squares = (1.0, SLOW_RMS * SLOW_RMS, 1.0 + FRESH_GROWTH * layer)
    norm = sum(square * width for square, width in zip(squares, widths, strict=True)) / columns
    popular, slow_part, fresh = (
        replace(tensor.values, std=ROUTER_GAIN * sqrt(share * norm / (square * width)))
        for share, square, width in zip(shares, squares, widths, strict=True)
    )
    bands = Band((0, rows), (0, BLOCK), popular), Band((0, rows), (BLOCK, 2 * BLOCK), slow_part)
    return replace(tensor, values=fresh, bands=bands)


def _first_mixer(tensor: SynthTensor, name: str, config: ModelConfig) -> SynthTensor:
    """Layer 0's delta net: the running mean of values that only the token decides, written to the slow block."""
    if name == "dt_bias":
        return replace(tensor, values=replace(tensor.values, mean=_DT_BIAS_MEAN))
    rows, columns = (0, tensor.shape[0]), (0, tensor.shape[-1])
    alone = sqrt(config.hidden_size / BLOCK)  # one block of inputs has the effect of all of them
    if name == "in_proj_b.weight":
        # Through a sigmoid this is how much of the memory a token replaces, 1 - KEPT. Inputs are near 1.
        write = replace(tensor.values, std=0.0, mean=-log(KEPT / (1.0 - KEPT)) / BLOCK)
        nothing = replace(tensor.values, std=0.0)
        return replace(tensor, values=nothing, bands=(Band(rows, (0, BLOCK), write),))
    bands: tuple[Band, ...] = ()
    if name == "in_proj_qkv.weight":
        same = replace(tensor.values, std=0.0, mean=CODE_STD)
        bands = (Band((0, 2 * config.key_dim), (0, BLOCK), same),)
    elif name == "conv1d.weight":
        same = replace(tensor.values, std=0.0, mean=tensor.values.std)
        bands = (Band((0, 2 * config.key_dim), columns, same),)
    elif name == f"in_proj_qkv.weight{SCALE_SUFFIX}":
        fixed, varied = (0, 2 * config.key_dim // BLOCK), (2 * config.key_dim // BLOCK, rows[1])
        bands = (
            _band(tensor, fixed, (1, columns[1]), _FAINT),
            _band(tensor, varied, (0, 2), _FAINT),
            _band(tensor, varied, (2, columns[1]), _VALUE_GAIN),
        )
    elif name == f"in_proj_z.weight{SCALE_SUFFIX}":
        bands = _band(tensor, rows, (0, 1), alone), _band(tensor, rows, (1, columns[1]), _FAINT)
    elif name == f"out_proj.weight{SCALE_SUFFIX}":
        bands = (
            _band(tensor, (0, 1), columns, _FAINT),
            _band(tensor, (1, 2), columns, _SLOW_GAIN),
            _band(tensor, (2, rows[1]), columns, _FAINT),
        )
    return replace(tensor, bands=bands)


def _band(tensor: SynthTensor, rows: tuple[int, int], columns: tuple[int, int], gain: float) -> Band:
    """A rectangle of the tensor's own numbers times `gain`."""
    values = tensor.values
    return Band(rows, columns, replace(values, std=values.std * gain, mean=values.mean * gain))
