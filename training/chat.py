"""Chat documents from documented Python functions: question and answer turns in the Qwen chat layout."""

from __future__ import annotations

import ast
import random
import re
import textwrap
from collections.abc import Iterable

from training.corpus import Document, name_hash

FUNCTION_LINES = range(4, 61)
DOCUMENT_CHARACTERS = (
    8_000  # turns of one file are gathered up to here, so that a document stays on one topic
)
SHORTEST_CHARACTERS = 1_500  # below it a document has too few tokens to have a topic

ASK_TO_WRITE = (
    "Write a Python function `{signature}`. {summary}",
    "Please write `{signature}` in Python. {summary}",
    "I need a Python function called `{name}`. {summary} Its signature is `{signature}`.",
    "Implement `{signature}`.\n\n{summary}",
    "How would you write `{signature}` in Python? {summary}",
    "{summary}\n\nWrite that as a Python function `{signature}`.",
)
ASK_TO_EXPLAIN = (
    "What does this function do?\n\n{code}",
    "Explain this Python function.\n\n{code}",
    "{code}\n\nWhat is `{name}` for?",
    "Write a docstring for this function:\n\n{code}",
    "I found this in some Python code. What does `{name}` do?\n\n{code}",
)
NO_THOUGHT = "<think>\n\n</think>\n\n"


def chat_documents(python: Iterable[Document], max_bytes: int) -> list[Document]:
    """Chat documents made from Python files, one or more per file, `max_bytes` at most, by name hash."""
    made = [chat for doc in python for chat in _chats_of(doc)]
    chosen, used = [], 0
    for chat in sorted(made, key=lambda chat: name_hash("choose", chat.name)):
        if used + chat.size <= max_bytes:
            chosen.append(chat)
            used += chat.size
    return sorted(chosen, key=lambda chat: chat.name)


def _chats_of(doc: Document) -> list[Document]:
    rng = random.Random(name_hash("chat", doc.name))
    try:
        tree = ast.parse(doc.text)
    except SyntaxError:
        return []
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    turns = [turn for node in functions if (turn := _turn(doc.text, node, rng))]
    rng.shuffle(turns)
    groups: list[list[tuple[str, str]]] = []
    for turn in turns:
        if not groups or sum(len(part) for past in groups[-1] for part in past) > DOCUMENT_CHARACTERS:
            groups.append([])
        groups[-1].append(turn)
    texts = [render(group, one_conversation=rng.random() < 0.5) for group in groups]
    return [
        Document("chat", f"{doc.name}#chat{number}", text)
        for number, text in enumerate(texts)
        if len(text) >= SHORTEST_CHARACTERS
    ]


def render(turns: list[tuple[str, str]], one_conversation: bool) -> str:
    """(question, answer) turns in the Qwen layout.

    In one conversation only the last answer has the empty thought: the template drops those of past turns.
    Otherwise each turn stands for a conversation of its own.
    """
    parts = []
    for number, (question, answer) in enumerate(turns, start=1):
        thought = "" if one_conversation and number < len(turns) else NO_THOUGHT
        parts.append(
            f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n{thought}{answer}<|im_end|>\n"
        )
    return "".join(parts)


def _turn(text: str, node: ast.FunctionDef, rng: random.Random) -> tuple[str, str] | None:
    """(question, answer) about one function, or None if it is undocumented, tiny or long."""
    docstring = ast.get_docstring(node)
    if not docstring or node.end_lineno is None or node.end_lineno - node.lineno not in FUNCTION_LINES:
        return None
    if len(node.body) < 2 or not (summary := first_sentence(docstring)):
        return None
    bare, documented = _code(text, node, False), _code(text, node, True)
    if rng.random() < 0.55:
        signature = f"{node.name}({ast.unparse(node.args)})"
        question = rng.choice(ASK_TO_WRITE).format(name=node.name, signature=signature, summary=summary)
        return question, documented if rng.random() < 0.5 else bare
    answer = re.sub(r"\n\s*\n.*", "", docstring, flags=re.DOTALL) if rng.random() < 0.5 else docstring
    return rng.choice(ASK_TO_EXPLAIN).format(name=node.name, code=bare), answer.strip()


def first_sentence(docstring: str) -> str:
    """First sentence of a docstring on one line, with a full stop; empty if it has no words."""
    paragraph = " ".join(docstring.strip().split("\n\n")[0].split())
    sentence = re.split(r"(?<=[.!?]) ", paragraph)[0].rstrip(":")
    if not re.search(r"[A-Za-z]{3}", sentence):
        return ""
    return sentence if sentence.endswith((".", "!", "?")) else sentence + "."


def _code(text: str, node: ast.FunctionDef, with_docstring: bool) -> str:
    """Dedented source of a function in a fenced block."""
    lines = text.split("\n")
    first, docstring = node.lineno - 1, node.body[0]
    assert node.end_lineno is not None
    assert docstring.end_lineno is not None
    kept = lines[first : node.end_lineno]
    if not with_docstring:
        del kept[docstring.lineno - 1 - first : docstring.end_lineno - first]
    return "```python\n" + textwrap.dedent("\n".join(kept)).strip("\n") + "\n```"
