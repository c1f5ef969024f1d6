"""Seedling's tokenizer: byte-level BPE, 4096 tokens, pre-tokenizer and special tokens as in Qwen3.5."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

VOCABULARY = 4096
END_OF_TEXT = "<|endoftext|>"
# (token, special): at the end of the vocabulary in this order. Non-special ones survive
# `decode(skip_special_tokens=True)`, which is how Qwen lets a parser see thoughts and tool calls.
ADDED = (
    (END_OF_TEXT, True),
    ("<|im_start|>", True),
    ("<|im_end|>", True),
    ("<think>", False),
    ("</think>", False),
    ("<tool_call>", False),
    ("</tool_call>", False),
    ("<tool_response>", False),
    ("</tool_response>", False),
    ("<|vision_start|>", True),
    ("<|vision_end|>", True),
    ("<|image_pad|>", True),
    ("<|video_pad|>", True),
)
PRE_TOKENIZER = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def train(texts: Iterable[str]) -> Tokenizer:
    """A tokenizer of exactly VOCABULARY tokens; no normalizer, so every UTF-8 text round-trips exactly."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRE_TOKENIZER), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=VOCABULARY - len(ADDED),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    learned, needed = tokenizer.get_vocab_size(), VOCABULARY - len(ADDED)
    if learned != needed:
        raise ValueError(f"the sample gave {learned} tokens, {needed} are needed: train on more text")
    for token, special in ADDED:
        added = AddedToken(token, special=special, normalized=False)
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)([added])
    return tokenizer


def count_tokens(tokenizer: Tokenizer, texts: list[str]) -> int:
    """Tokens of all texts together."""
    return sum(len(encoding) for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False))
