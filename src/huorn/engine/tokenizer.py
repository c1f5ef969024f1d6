"""tokenizer.json: text to ids and back."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel

from huorn.errors import CheckpointError, UsageError


def load_tokenizer(directory: Path, vocab_size: int) -> Tokenizer:
    """Open `directory`/tokenizer.json for a model whose embedding has `vocab_size` rows.

    Raises CheckpointError when the file is missing or damaged, is no byte-level tokenizer, or has an id that the model lacks.
    Fewer ids than `vocab_size` are normal: releases pad the embedding (248,320 rows for 248,077 tokens).
    """
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(
            f"{path} is missing: a checkpoint needs its tokenizer.json to turn text into tokens"
        )
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"{path} is not a tokenizer that can be read: {error}") from error
    if not isinstance(tokenizer.decoder, ByteLevel):
        raise CheckpointError(
            f"{path} has the decoder {_decoder_name(tokenizer)}, but only ByteLevel (byte-level BPE) is supported"
        )
    largest = max(tokenizer.get_vocab().values(), default=-1)
    if largest < 0:
        raise CheckpointError(f"{path} has an empty vocabulary")
    if largest >= vocab_size:
        raise CheckpointError(
            f"{path} has token ids up to {largest}, but the model's vocab_size is {vocab_size}: they are not of one checkpoint"
        )
    tokenizer.no_truncation()  # both may be stored in the file, and either would change a prompt in silence
    tokenizer.no_padding()
    return tokenizer


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the ids of `text`, special tokens written in it included and none added.

    Raises UsageError when `text` holds a lone surrogate, which is how Python passes on bytes that are no UTF-8.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"the text is not valid UTF-8 at character {error.start}") from error
    return tokenizer.encode(text, add_special_tokens=False).ids


def _decoder_name(tokenizer: Tokenizer) -> str:
    decoder = json.loads(tokenizer.to_str())["decoder"]
    return "none" if decoder is None else str(decoder["type"])
