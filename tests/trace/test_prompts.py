"""Lines of a file of prompts: what becomes of them, and what is refused by its line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from huorn.assets import EMBEDDED_MODEL
from huorn.checkpoint.config import read_config
from huorn.engine.messages import parse_messages
from huorn.engine.template import ChatTemplate
from huorn.engine.tokenizer import encode, load_tokenizer
from huorn.errors import UsageError
from huorn.trace.prompts import Prompt, PromptReader, RecordMode

CONFIG = read_config(EMBEDDED_MODEL)
TOKENIZER = load_tokenizer(EMBEDDED_MODEL, CONFIG.vocab_size)
READER = PromptReader(
    Path("p.jsonl"), "decode", 100, CONFIG, TOKENIZER, ChatTemplate.load(EMBEDDED_MODEL), context=200
)
CHAT = [{"role": "user", "content": "Sort a list"}, {"role": "assistant", "content": "Use sorted()."}]


def read(*values: object, mode: RecordMode = "decode", tokens: int = 100) -> list[Prompt]:
    data = "\n\n".join(json.dumps(value) for value in values).encode()
    return replace(READER, mode=mode, tokens=tokens).read(data, lambda done, total: None)


def ids_of(text: str) -> list[int]:
    return encode(TOKENIZER, text)


def test_decode() -> None:
    first, second, chat, by_id = read(
        {"prompt": "def f(x):", "completion": "never read", "source": 7},
        {"prompt": "def f(x):"},
        {"messages": CHAT},
        {"ids": [5, 6, 7], "prompt_tokens": 2},
    )
    assert first.ids.tolist() == ids_of("def f(x):")
    assert (first.line, second.line) == (1, 3)
    assert first.sha256 == second.sha256
    assert first.prompt_tokens == len(first.ids)
    template = ChatTemplate.load(EMBEDDED_MODEL)
    assert template is not None
    assert chat.ids.tolist() == ids_of(template.render(parse_messages(CHAT[:1], "x")))
    assert by_id.ids.tolist() == [5, 6]


def test_teacher() -> None:
    pair, text, chat, by_id, whole = read(
        {"prompt": "def f(x):", "completion": " return x"},
        {"text": "some words"},
        {"messages": CHAT},
        {"ids": [5, 6, 7], "prompt_tokens": 2},
        {"ids": [5, 6, 7]},
        mode="teacher",
    )
    assert pair.ids.tolist() == ids_of("def f(x):") + ids_of(" return x")
    assert pair.prompt_tokens == len(ids_of("def f(x):"))
    assert (text.ids.tolist(), text.prompt_tokens) == (ids_of("some words"), 0)
    assert chat.ids.tolist()[chat.prompt_tokens :] == ids_of("Use sorted().<|im_end|>")
    assert (by_id.ids.tolist(), by_id.prompt_tokens) == ([5, 6, 7], 2)
    assert (whole.ids.tolist(), whole.prompt_tokens) == ([5, 6, 7], 0)


def test_an_answer_with_thoughts_follows_what_was_asked() -> None:
    """The template asks with an empty thought, so the answer's own are what it goes on with."""
    thoughtful = [CHAT[0], {"role": "assistant", "content": "<think>\nhm\n</think>\n\nUse it."}]
    (chat,) = read({"messages": thoughtful}, mode="teacher")
    (plain,) = read({"messages": CHAT}, mode="decode")
    assert chat.ids.tolist()[: chat.prompt_tokens] == plain.ids.tolist()
    assert len(chat.ids) > chat.prompt_tokens


def test_texts_are_cut_at_tokens() -> None:
    (pair,) = read({"ids": list(range(50)), "prompt_tokens": 10}, mode="teacher", tokens=7)
    assert pair.ids.tolist() == list(range(17))


def test_a_shared_system_message_makes_nothing_alike() -> None:
    system = {"role": "system", "content": "You are a helpful assistant who always answers in one line. " * 2}
    one, other = read(
        {"messages": [system, {"role": "user", "content": "Sort a list"}]},
        {"messages": [system, {"role": "user", "content": "What is a heap?"}]},
    )
    assert not set(one.shingles.tolist()) & set(other.shingles.tolist())
    assert one.sha256 != other.sha256


@pytest.mark.parametrize(
    ("line", "mode", "says"),
    [
        ("{", "decode", "is not valid JSON"),
        ("[1]", "decode", 'must be an object with one of "prompt", "messages", "text" and "ids"'),
        ('{"x": 1}', "decode", "must be an object with one of"),
        ('{"prompt": "a", "text": "b"}', "teacher", "must be an object with one of"),
        ('{"prompt": 5}', "decode", 'must have a string as "prompt"'),
        ('{"prompt": ""}', "decode", "is empty"),
        ('{"prompt": "\\ud800"}', "decode", "the text is not valid UTF-8"),
        ('{"prompt": "a"}', "teacher", 'must have a string as "completion"'),
        ('{"text": "a"}', "decode", 'has a "text", which --mode teacher reads'),
        ('{"text": ""}', "teacher", "is empty"),
        ('{"messages": 3}', "decode", "must hold a list of messages"),
        ('{"messages": []}', "decode", "has no message of the user"),
        ('{"messages": [{"role": "user", "content": "a"}]}', "teacher", "must end with a message of the assistant"),
        ('{"messages": [{"role": "tool", "content": "a"}]}', "decode", "message 1 has the role 'tool'"),
        ('{"ids": [1, 4096]}', "decode", "must have a list of token ids from 0 to 4095"),
        ('{"ids": [1, true]}', "decode", "must have a list of token ids"),
        ('{"ids": [1, 2], "prompt_tokens": 3}', "teacher", 'must have 0 to 2, the number of its ids, as "prompt_tokens"'),
        ('{"ids": [1, 2], "prompt_tokens": 0}', "decode", "is empty"),
        (json.dumps({"ids": [1] * 101}), "decode", "needs 201 tokens of context, which has 200"),
        (json.dumps({"ids": [1] * 201, "prompt_tokens": 150}), "teacher", "needs 201 tokens of context"),
    ],
)  # fmt: skip
def test_bad_lines(line: str, mode: RecordMode, says: str) -> None:
    data = f'{{"ids": [1, 2], "prompt_tokens": 1}}\n\n{line}\n'.encode()
    with pytest.raises(UsageError, match=f"^--prompts p.jsonl, line 3[:,]? .*{says}"):
        replace(READER, mode=mode).read(data, lambda done, total: None)


def test_bytes_that_are_no_text() -> None:
    with pytest.raises(UsageError, match="line 1 is not UTF-8: byte 2 is 0xff"):
        READER.read(b'{"\xff', lambda done, total: None)
    with pytest.raises(UsageError, match="holds no prompt"):
        READER.read(b"\n \n", lambda done, total: None)


def test_a_model_without_a_template() -> None:
    data = json.dumps({"messages": CHAT}).encode()
    with pytest.raises(UsageError, match='line 1 has "messages", but this model has no chat template'):
        replace(READER, template=None).read(data, lambda done, total: None)
