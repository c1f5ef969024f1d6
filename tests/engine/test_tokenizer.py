"""Tokenizer files that fit a model, and those that do not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

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
    for damage, message in (
        ("", "not valid JSON"),
        ("{}", "is not a tokenizer"),
        ('{"model": {"type": "BPE"}}', "is not a tokenizer"),
        ("version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
    ):
        (tmp_path / "tokenizer.json").write_text(damage)
        with pytest.raises(CheckpointError, match=rf"tokenizer\.json .*{message}"):
            load_tokenizer(tmp_path, 512)


BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
WHITESPACE = {"type": "Sequence", "pretokenizers": [{"type": "Whitespace"}, {"type": "Digits"}]}
SPLIT = {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, BYTE_LEVEL]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model.dropout": 0.5}, r"has dropout 0\.5, which splits the same text at random"),
        ({"model.type": "WordPiece"}, "has the model WordPiece, but only BPE"),
        ({"model.continuing_subword_prefix": "##"}, "has continuing_subword_prefix '##'"),
        ({"model.end_of_word_suffix": "</w>"}, "has end_of_word_suffix '</w>'"),
        ({"pre_tokenizer": None}, "has the pre_tokenizer none, but only ByteLevel"),
        ({"pre_tokenizer": WHITESPACE}, "has the pre_tokenizer Whitespace, Digits, but only ByteLevel"),
        ({"decoder": None}, "has the decoder none, but only ByteLevel"),
        ({"decoder": {"type": "Metaspace"}}, "has the decoder Metaspace, but only ByteLevel"),
        ({"decoder": {"type": "Sequence", "decoders": [BYTE_LEVEL, {"type": "Fuse"}]}}, "decoder ByteLevel, Fuse"),
        ({"model.vocab": {}}, r"no token for the byte 0x00 \(256 bytes lack one\)"),
        ({"model.vocab": []}, "is not a tokenizer: it has no model with a vocabulary"),
        ({"model": []}, "is not a tokenizer: it has no model with a vocabulary"),
        # tokenizers 0.23 panics here, which is no Exception
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}, "is not a tokenizer that can be read"),
    ],
)  # fmt: skip
def test_what_is_no_byte_level_bpe_is_refused(
    tmp_path: Path, tokenizer: Tokenizer, changes: dict[str, object], message: str
) -> None:
    file = json.loads(tokenizer.to_str())
    for name, value in changes.items():
        *holder, last = name.split(".")
        (file[holder[0]] if holder else file)[last] = value
    (tmp_path / "tokenizer.json").write_text(json.dumps(file))
    with pytest.raises(CheckpointError, match=message) as caught:
        load_tokenizer(tmp_path, 512)
    assert "tokenizer.json" in str(caught.value)


def test_a_pattern_that_never_ends_is_one_sentence(tmp_path: Path, tokenizer: Tokenizer) -> None:
    file = json.loads(tokenizer.to_str())
    split = {"type": "Split", "pattern": {"Regex": "(a|a|aa)+$"}, "behavior": "Isolated", "invert": False}
    file["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, BYTE_LEVEL]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(file))
    with pytest.raises(CheckpointError, match=r"can not split the text: .*retry-limit"):
        encode(load_tokenizer(tmp_path, 512), "a" * 40 + "b")


def test_a_post_processor_changes_no_prompt(tmp_path: Path, tokenizer: Tokenizer) -> None:
    file = json.loads(tokenizer.to_str())
    drops = {"type": "TemplateProcessing", "single": [], "pair": [], "special_tokens": {}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(file | {"post_processor": drops}))
    assert encode(load_tokenizer(tmp_path, 512), "text") == encode(tokenizer, "text")


def test_one_byte_without_a_token_is_named(tmp_path: Path, tokenizer: Tokenizer) -> None:
    file = json.loads(tokenizer.to_str())
    del file["model"]["vocab"]["~"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(file))
    with pytest.raises(CheckpointError, match=r"the byte 0x7e \(1 bytes lack one\)"):
        load_tokenizer(tmp_path, 512)


def test_what_changes_nothing_opens(tmp_path: Path, tokenizer: Tokenizer) -> None:
    file = json.loads(tokenizer.to_str())
    file["model"] |= {"dropout": 0, "continuing_subword_prefix": "", "end_of_word_suffix": ""}
    file["pre_tokenizer"] = SPLIT
    (tmp_path / "tokenizer.json").write_text(json.dumps(file))
    assert load_tokenizer(tmp_path, 512).decode(encode(load_tokenizer(tmp_path, 512), "a 12 ü")) == "a 12 ü"


def test_a_folder_whose_name_is_no_utf8(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (tmp_path / "n\udcff").mkdir()
    (tmp_path / "n\udcff" / "tokenizer.json").write_text(tokenizer.to_str())
    assert load_tokenizer(tmp_path / "n\udcff", 512).to_str() == tokenizer.to_str()


def test_encode_sees_markers_and_adds_none(tokenizer: Tokenizer) -> None:
    ids = encode(tokenizer, "<|im_start|>user\nhi<|im_end|>")
    assert ids[0] == tokenizer.token_to_id("<|im_start|>")
    assert ids[-1] == tokenizer.token_to_id("<|im_end|>")
    assert encode(tokenizer, "") == []


def test_encode_refuses_lone_surrogates(tokenizer: Tokenizer) -> None:
    """An argument that is no UTF-8 arrives like this."""
    with pytest.raises(UsageError, match="not valid UTF-8 at character 2"):
        encode(tokenizer, b"ab\xff".decode("utf-8", "surrogateescape"))
