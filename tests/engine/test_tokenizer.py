"""Tokenizer files that fit a model, and those that do not."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models

from huorn.engine.tokenizer import encode, load_tokenizer
from huorn.errors import CheckpointError, UsageError


def test_the_vocabulary_may_be_smaller_but_not_larger(tmp_path: Path, tokenizer: Tokenizer) -> None:
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    size = tokenizer.get_vocab_size()
    assert load_tokenizer(tmp_path, size).get_vocab_size() == size
    assert load_tokenizer(tmp_path, size + 100).get_vocab_size() == size
    with pytest.raises(
        CheckpointError, match=rf"token ids up to {size - 1}, but the model's vocab_size is {size - 1}"
    ):
        load_tokenizer(tmp_path, size - 1)


def test_stored_truncation_and_padding_are_off(tmp_path: Path, tokenizer: Tokenizer) -> None:
    other = Tokenizer.from_str(tokenizer.to_str())
    other.enable_truncation(4)
    other.enable_padding(length=50)
    other.save(str(tmp_path / "tokenizer.json"))
    text = "a long prompt that must stay whole"
    assert encode(load_tokenizer(tmp_path, 512), text) == tokenizer.encode(text).ids


def test_missing_damaged_and_foreign_files(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is missing"):
        load_tokenizer(tmp_path, 512)
    for damage in ("", "{}", "version https://git-lfs.github.com/spec/v1\n", '{"model": {"type": "BPE"}}'):
        (tmp_path / "tokenizer.json").write_text(damage)
        with pytest.raises(CheckpointError, match=r"tokenizer\.json is not a tokenizer"):
            load_tokenizer(tmp_path, 512)
    foreign = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    for decoder, name in ((None, "none"), (decoders.Metaspace(), "Metaspace")):
        if decoder is not None:
            foreign.decoder = decoder
        foreign.save(str(tmp_path / "tokenizer.json"))
        with pytest.raises(CheckpointError, match=rf"decoder {name}, but only ByteLevel"):
            load_tokenizer(tmp_path, 512)


def test_encode_sees_markers_and_adds_none(tokenizer: Tokenizer) -> None:
    ids = encode(tokenizer, "<|im_start|>user\nhi<|im_end|>")
    assert ids[0] == tokenizer.token_to_id("<|im_start|>")
    assert ids[-1] == tokenizer.token_to_id("<|im_end|>")
    assert encode(tokenizer, "") == []


def test_encode_refuses_lone_surrogates(tokenizer: Tokenizer) -> None:
    """An argument that is no UTF-8 arrives like this."""
    with pytest.raises(UsageError, match="not valid UTF-8 at character 2"):
        encode(tokenizer, b"ab\xff".decode("utf-8", "surrogateescape"))
