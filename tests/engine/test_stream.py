"""Streamed text against tokenizer.decode, stop strings against str.find."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from huorn.engine.stream import StopStrings, StreamDecoder, byte_level_alphabet
from huorn.errors import UsageError

IDS = st.integers(0, 430)  # the tokenizer of conftest.py has 398: some of them stand for no token
CODE_UNITS = st.characters(exclude_categories=["Cs"])


def pieces_of(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    decoder = StreamDecoder(tokenizer)
    return [decoder.push(token_id) for token_id in ids] + [decoder.flush()]


@settings(max_examples=400, deadline=None)
@given(st.text(CODE_UNITS))
def test_any_text_comes_back_in_whole_characters(tokenizer: Tokenizer, text: str) -> None:
    pieces = pieces_of(tokenizer, tokenizer.encode(text).ids)
    assert "".join(pieces) == tokenizer.decode(tokenizer.encode(text).ids)
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


@settings(max_examples=400, deadline=None)
@given(st.lists(IDS))
def test_any_ids_give_the_text_of_decode(tokenizer: Tokenizer, ids: list[int]) -> None:
    """Broken bytes, ids without a token and special tokens included."""
    assert "".join(pieces_of(tokenizer, ids)) == tokenizer.decode(ids)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(range(0x80, 0x100)), max_size=12))
def test_any_bytes_that_are_no_utf8(tokenizer: Tokenizer, data: list[int]) -> None:
    character = {byte: text for text, byte in byte_level_alphabet().items()}
    ids = [tokenizer.token_to_id(character[byte]) for byte in data]
    assert "".join(pieces_of(tokenizer, ids)) == tokenizer.decode(ids)


def test_alphabet_is_that_of_the_tokenizers_library() -> None:
    assert set(byte_level_alphabet()) == set(pre_tokenizers.ByteLevel.alphabet())
    assert sorted(byte_level_alphabet().values()) == list(range(256))


def test_a_character_of_several_tokens_comes_with_its_last(tokenizer: Tokenizer) -> None:
    character = {byte: text for text, byte in byte_level_alphabet().items()}
    ids = [tokenizer.token_to_id(character[byte]) for byte in "a🦌b".encode()]
    assert pieces_of(tokenizer, ids) == ["a", "", "", "", "🦌", "b", ""]
    assert pieces_of(tokenizer, ids[:3]) == ["a", "", "", "\ufffd"]


def test_special_tokens_are_silent_and_others_are_not(tokenizer: Tokenizer) -> None:
    ids = [tokenizer.token_to_id(text) for text in ("<|im_start|>", "<think>", "<|im_end|>", "</think>")]
    assert pieces_of(tokenizer, ids) == ["", "<think>", "", "</think>", ""]


def test_added_tokens_outside_the_alphabet() -> None:
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(byte_level_alphabet())}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken("<｜ende｜>"), AddedToken("é x"), AddedToken("日本")])
    ids = [256, 257, 258, tokenizer.token_to_id("a"), 258]
    assert "".join(pieces_of(tokenizer, ids)) == tokenizer.decode(ids)


def test_time_per_token_does_not_grow(tokenizer: Tokenizer) -> None:
    decoder = StreamDecoder(tokenizer)
    ids = tokenizer.encode("the quick brown fox 日本語 " * 40).ids
    times = []
    for _ in range(40):
        begin = time.perf_counter()
        for token_id in ids:
            decoder.push(token_id)
        times.append(time.perf_counter() - begin)
    assert min(times[20:]) < 3 * min(
        times[:20]
    )  # decoding everything each time would be 3 times slower by then, and rising


SMALL_TEXT = st.text("ab<|", max_size=30)
STOPS = st.lists(st.text("ab<|", min_size=1, max_size=5), max_size=4)


@st.composite
def texts_in_pieces(draw: st.DrawFn) -> tuple[str, list[str]]:
    text = draw(SMALL_TEXT)
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=10)))
    return text, [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def cut_at_stop(text: str, stops: list[str]) -> tuple[str, bool]:
    """Brute force: grow the text character by character until some stop string is complete."""
    for end in range(1, len(text) + 1):
        starts = [text[:end].find(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)], True
    return text, False


@settings(max_examples=500, deadline=None)
@given(texts_in_pieces(), STOPS)
def test_stop_strings_against_brute_force(cut: tuple[str, list[str]], stops: list[str]) -> None:
    text, pieces = cut
    want, found = cut_at_stop(text, stops)
    watcher, got, stopped = StopStrings(stops), "", False
    for piece in pieces:
        out, stopped = watcher.push(piece)
        got += out
        assert want.startswith(got)  # nothing that a stop string would take back
        if stopped:
            break
    got += watcher.flush()
    assert (got, stopped) == (want, found)


@settings(max_examples=300, deadline=None)
@given(SMALL_TEXT, st.text("ab<|", min_size=1, max_size=5))
def test_one_stop_string_is_str_find(text: str, stop: str) -> None:
    watcher = StopStrings([stop])
    out = ""
    for character in text:
        piece, stopped = watcher.push(character)
        out += piece
        if stopped:
            break
    out += watcher.flush()
    place = text.find(stop)
    assert out == (text if place < 0 else text[:place])


@pytest.mark.parametrize("size", [1, 2, 3, 10])
def test_the_stop_string_that_is_complete_first_wins(size: int) -> None:
    """ "bc" ends before "abcd" does, although it begins later; and "abc" ends with it and is longer."""
    for stops, want in ((["abcd", "bc"], "xa"), (["abcd", "bc", "abc"], "x")):
        watcher, out = StopStrings(stops), ""
        for start in range(0, 6, size):
            piece, stopped = watcher.push("xabcdz"[start : start + size])
            out += piece
            if stopped:
                break
        assert out == want


def test_text_is_held_back_only_while_it_may_become_a_stop_string() -> None:
    watcher = StopStrings(["<|end|>"])
    assert watcher.push("x <") == ("x ", False)
    assert watcher.push("|") == ("", False)
    assert watcher.push("e.") == ("<|e.", False)


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(UsageError, match="--stop is empty"):
        StopStrings(["a", ""])
