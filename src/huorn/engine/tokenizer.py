"""tokenizer.json: text to ids and back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from huorn.checkpoint.config import read_json
from huorn.engine.stream import byte_level_alphabet
from huorn.errors import CheckpointError, UsageError


def load_tokenizer(directory: Path, vocab_size: int) -> Tokenizer:
    """Open `directory`/tokenizer.json for a model whose embedding has `vocab_size` rows.

    Raises CheckpointError when the file is missing or damaged, is no byte-level BPE in every part, would give one text
    different ids from call to call, or has an id that the model lacks. Fewer ids than `vocab_size` are normal: releases pad
    the embedding (248,320 rows for 248,077 tokens).
    """
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(
            f"{path} is missing: a checkpoint needs its tokenizer.json to turn text into tokens"
        )
    _refuse_other_kinds(path, read_json(path))
    with _panics_caught(f"{path} is not a tokenizer that can be read"):
        tokenizer = Tokenizer.from_buffer(path.read_bytes())  # from_file takes no path that is not UTF-8
    largest = max(tokenizer.get_vocab().values())
    if largest >= vocab_size:
        raise CheckpointError(
            f"{path} has token ids up to {largest}, but the model's vocab_size is {vocab_size}: they are not of one checkpoint"
        )
    tokenizer.no_truncation()  # both may be stored in the file, and either would change a prompt in silence
    tokenizer.no_padding()
    tokenizer.post_processor = (
        None  # adds special tokens, which are not wanted; one of a damaged file drops the text
    )
    return tokenizer


def _refuse_other_kinds(path: Path, file: Mapping[str, Any]) -> None:
    """Raise CheckpointError unless `file`, the content of tokenizer.json, is a byte-level BPE that loses no byte.

    The library would open the others: it leaves out what its vocabulary lacks, and StreamDecoder would misread the rest.
    """
    model = file.get("model")
    if not isinstance(model, dict) or not isinstance(model.get("vocab"), dict):
        raise CheckpointError(f"{path} is not a tokenizer: it has no model with a vocabulary")
    if model.get("type") != "BPE":
        raise CheckpointError(f"{path} has the model {model.get('type')}, but only BPE is supported")
    if model.get("dropout"):
        raise CheckpointError(
            f"{path} has dropout {model['dropout']}, which splits the same text at random: it must be null"
        )
    for name in ("continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(name):
            raise CheckpointError(f"{path} has {name} {model[name]!r}, but byte-level BPE has none")
    for part in ("pre_tokenizer", "decoder"):
        kinds = _kinds(file.get(part))
        if "ByteLevel" not in kinds or (part == "decoder" and kinds != ["ByteLevel"]):
            raise CheckpointError(
                f"{path} has the {part} {', '.join(kinds) or 'none'}, but only ByteLevel (byte-level BPE) is supported"
            )
    lacking = [byte for character, byte in byte_level_alphabet().items() if character not in model["vocab"]]
    if lacking:
        raise CheckpointError(
            f"{path} has no token for the byte 0x{min(lacking):02x} ({len(lacking)} bytes lack one), so some text would be lost"
        )


def _kinds(part: object) -> list[str]:
    """The type of a pre-tokenizer or decoder, of a sequence those of its steps."""
    if not isinstance(part, dict):
        return []
    steps = part.get("pretokenizers", part.get("decoders")) if part.get("type") == "Sequence" else None
    return [
        str(step.get("type"))
        for step in (steps if isinstance(steps, list) else [part])
        if isinstance(step, dict)
    ]


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the ids of `text`, special tokens written in it included and none added.

    Raises CheckpointError when the tokenizer fails, as on a pattern that never ends; UsageError when `text` holds a lone
    surrogate, which is how Python passes on bytes that are no UTF-8.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"the text is not valid UTF-8 at character {error.start}") from error
    with _panics_caught("the tokenizer of this model can not split the text"):
        return tokenizer.encode(text, add_special_tokens=False).ids


@contextmanager
def _panics_caught(sentence: str) -> Iterator[None]:
    """Turn whatever the library raises into a CheckpointError: bare Exception, and panics, which are not even that."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        raise CheckpointError(f"{sentence}: {error}") from error
