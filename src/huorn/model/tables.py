"""Where the two tables [V, D] of a model lie: the embedding and lm_head, 1.02 GB each in the 35B shape."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from huorn.checkpoint.config import ModelConfig
from huorn.checkpoint.names import F8
from huorn.checkpoint.reader import Checkpoint
from huorn.model.precision import Precision

LmHead = Literal["two-pass", "full"]

# BF16 bytes from which a table is worth it. Smaller ones are read in under a millisecond, from a cache where it is large.
LARGE_BYTES = 16 << 20


@dataclass(frozen=True)
class Tables:
    """How the decoder on native kernels holds them.

    two_pass: lm_head as INT8 in RAM, its BF16 rows in the file (model/two_pass_head.py). by_row: the embedding in the file too,
    of which a token needs one row; with two_pass and tied weights nothing is gained where it is not.
    """

    config: ModelConfig
    two_pass: bool
    by_row: bool

    @classmethod
    def of(cls, checkpoint: Checkpoint, precision: Precision, lm_head: LmHead = "two-pass") -> Tables:
        """What `--lm-head` means for a checkpoint: full where there is nothing to gain, as for a small vocabulary, a head in FP8
        (as many bytes as its INT8 copy) or F32 operands."""
        config = checkpoint.config
        two_pass = (
            lm_head == "two-pass"
            and precision is Precision.BF16
            and 2 * config.vocab_size * config.hidden_size >= LARGE_BYTES
            and checkpoint.stored_dtype("lm_head.weight") != F8
        )
        return cls(config, two_pass, by_row=two_pass)

    def held_bytes(self, name: str, nbytes: int) -> int:
        """Bytes in RAM of a tensor that takes nbytes as stored; name with or without prefix."""
        tied = self.config.tie_word_embeddings
        if "embed_tokens." in name:
            return (0 if self.by_row else nbytes) + (
                coded_bytes(self.config) if tied and self.two_pass else 0
            )
        return coded_bytes(self.config) if "lm_head." in name and self.two_pass else nbytes


def coded_bytes(config: ModelConfig) -> int:
    """INT8 copy of the head: two F32 per row, filled up to a page, and one byte per weight."""
    return -(-8 * config.vocab_size // 4096) * 4096 + config.vocab_size * config.hidden_size
