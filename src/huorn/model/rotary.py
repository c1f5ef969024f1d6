"""Rotary position embedding on the first `rotary_dim` dimensions of each head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from huorn.checkpoint.config import ModelConfig


@dataclass(frozen=True, eq=False)
class Rotation:
    """cos and sin f32 [T, 1, rotary_dim / 2] of T consecutive positions."""

    cos: Tensor
    sin: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """Rotates x f32 [T, H, head_dim]: dimension i < rotary_dim / 2 turns with dimension i + rotary_dim / 2,
        and dimensions from rotary_dim on pass through."""
        half = self.cos.shape[-1]
        first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        turned = (first * self.cos - second * self.sin, second * self.cos + first * self.sin)
        return torch.cat((*turned, rest), dim=-1)


class Rotary:
    """Angles position * theta^(-2i / rotary_dim), i = 0 .. rotary_dim / 2 - 1 (RoFormer, arXiv 2104.09864).

    The checkpoints ask for multimodal rotary ("mrope", interleaved sections): frequency i takes its position
    from the time, height or width grid, by i mod 3. A text token has the same position in all three grids,
    whatever the sections are, so every frequency sees the one text position and mrope is plain rotary. huorn
    is text only, hence sections are not read.

    Frequencies are computed in F32, as every implementation of the model does: at position 262,143 an angle
    from F64 frequencies would differ by up to 0.02 rad from what the model was trained with.
    """

    def __init__(self, config: ModelConfig) -> None:
        exponents = torch.arange(0, config.rotary_dim, 2, dtype=torch.float32) / config.rotary_dim
        self.frequencies = 1.0 / (config.rope_theta**exponents)  # f32 [rotary_dim / 2]
        self._cosine = self._sine = torch.empty(0, len(exponents))

    def table(self, positions: Sequence[int], lengths: Sequence[int]) -> tuple[int, int, object]:
        """Addresses of cos and sin f32 [T, rotary_dim / 2] of several runs of positions, one behind the other, and what must be
        kept as long as they are used.

        Rows of one table over all positions so far, computed in F64 from the F32 angle and rounded, so that a row does not
        depend on what else was asked for; it doubles when a position is behind its end."""
        longest = max(p + n for p, n in zip(positions, lengths, strict=True))
        if longest > len(self._cosine):
            angles = torch.arange(2 * longest, dtype=torch.float32)[:, None] * self.frequencies
            self._cosine, self._sine = angles.double().cos().float(), angles.double().sin().float()
        cosine, sine, skipped = self._cosine, self._sine, 4 * self._cosine.shape[1] * positions[0]
        if len(lengths) > 1:
            runs = [slice(p, p + n) for p, n in zip(positions, lengths, strict=True)]
            cosine, sine = (torch.cat([table[run] for run in runs]) for table in (cosine, sine))
            skipped = 0
        return cosine.data_ptr() + skipped, sine.data_ptr() + skipped, (cosine, sine)

    def at(self, position: int, tokens: int) -> Rotation:
        """The rotation of positions position .. position + tokens - 1."""
        positions = torch.arange(position, position + tokens, dtype=torch.float32)
        angles = positions[:, None, None] * self.frequencies
        return Rotation(angles.cos(), angles.sin())
