"""The tokenizer of a synthetic checkpoint takes any text, gives it back, and has a token for every id."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from huorn.engine.messages import Message
from huorn.engine.template import ChatTemplate
from huorn.synth.tokenizer import CHAT_TEMPLATE, special_token_id, tokenizer_json


@pytest.fixture(scope="module")
def full() -> Tokenizer:
    return Tokenizer.from_str(tokenizer_json(248_320))


@pytest.fixture(scope="module")
def small() -> Tokenizer:
    return Tokenizer.from_str(tokenizer_json(520))


@pytest.mark.parametrize("size", [289, 520, 248_320])
def test_every_id_is_a_token(size: int) -> None:
    vocab = Tokenizer.from_str(tokenizer_json(size)).get_vocab()
    assert sorted(vocab.values()) == list(range(size))


def test_special_tokens_have_the_ids_of_the_release(full: Tokenizer) -> None:
    known = {
        "<|endoftext|>": 248_044, "<|im_start|>": 248_045, "<|im_end|>": 248_046, "<|vision_start|>": 248_053,
        "<|vision_end|>": 248_054, "<|image_pad|>": 248_056, "<|video_pad|>": 248_057, "<think>": 248_068,
        "</think>": 248_069,
    }  # fmt: skip
    for token, token_id in known.items():
        assert full.token_to_id(token) == token_id == special_token_id(token, 248_320)
        assert full.encode(f"a{token}b").ids.count(token_id) == 1


@settings(deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_round_trips(small: Tokenizer, text: str) -> None:
    assert small.decode(small.encode(text).ids, skip_special_tokens=False) == text


@pytest.mark.parametrize(
    "text",
    [
        "The quick brown fox, 12345.\r\n\t  é",
        "a\u0301 ﬁ 東京 👩‍👩‍👧 \x00\x7f",
        "if x:\n        return  y  \n\n\n",
        "İ ß ς",
    ],
)
def test_full_vocabulary_round_trips(full: Tokenizer, text: str) -> None:
    assert full.decode(full.encode(text).ids) == text


def test_english_takes_about_a_token_for_three_letters(full: Tokenizer) -> None:
    text = "the weather will stay the same over the next days and then turn colder in the mountains"
    assert len(full.encode(text).ids) < len(text) / 2.5


def test_chat_template_marks_turns() -> None:
    template = ChatTemplate(CHAT_TEMPLATE, "here")
    messages = [Message("system", "Be brief."), Message("user", "Hi ")]
    head = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert template.render(messages) == head + "<think>\n"
    assert template.render(messages, enable_thinking=False) == head + "<think>\n\n</think>\n\n"
    assert template.render(messages, add_generation_prompt=False) == head.removesuffix(
        "<|im_start|>assistant\n"
    )
