"""The JSONL file of prompts: one object a line, checked and turned into token ids before a model is loaded."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from huorn.checkpoint.config import ModelConfig
from huorn.engine.messages import Message, parse_messages
from huorn.engine.template import ChatTemplate
from huorn.engine.tokenizer import encode
from huorn.errors import UsageError, reason
from huorn.files import decode_utf8
from huorn.trace.shingles import id_shingles, text_shingles

RecordMode = Literal["decode", "teacher"]
_KINDS = ("prompt", "messages", "text", "ids")


@dataclass(frozen=True, eq=False)
class Prompt:
    """One line: ids int32 [n >= 1], of which the first `prompt_tokens` are read and not recorded.

    With --mode decode these are all, at least one; with teacher the others are given too. `shingles` are what it is compared
    with others by, and `sha256` is that of what counts of the line.
    """

    line: int
    sha256: str
    ids: NDArray[np.int32]
    prompt_tokens: int
    shingles: NDArray[np.uint64]


@dataclass(frozen=True, eq=False)
class PromptReader:
    """Reads lines for one model and mode.

    decode takes {"prompt"}, {"messages"} or {"ids", "prompt_tokens"}; of an answer that is there too (completion, a last message
    of the assistant, ids after prompt_tokens) it reads nothing, so that one file serves both modes. teacher takes {"prompt",
    "completion"}, {"messages"} whose last is the assistant's, {"text"} or {"ids"}. Other keys are left alone.
    """

    path: Path
    mode: RecordMode
    tokens: int
    config: ModelConfig
    tokenizer: Tokenizer
    template: ChatTemplate | None
    context: int

    def read(self, data: bytes, progress: Callable[[int, int], None]) -> list[Prompt]:
        """All prompts of the file's `data`; progress(bytes, bytes in all). Empty lines are passed over.

        Raises UsageError naming the line that can not be used, CheckpointError when the tokenizer fails.
        """
        prompts, done = list[Prompt](), 0
        for number, line in enumerate(data.split(b"\n"), 1):
            if line.strip():
                prompts.append(self._prompt(number, line))
            done += len(line) + 1
            progress(min(done, len(data)), len(data))
        if not prompts:
            raise UsageError(f"--prompts {self.path} holds no prompt: give one JSON object a line")
        return prompts

    def _prompt(self, number: int, line: bytes) -> Prompt:
        where = f"--prompts {self.path}, line {number}"
        try:
            value = json.loads(decode_utf8(line, where))
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{where} is not valid JSON: {error}") from error
        kinds = [kind for kind in _KINDS if isinstance(value, dict) and kind in value]
        if len(kinds) != 1:
            raise UsageError(f'{where} must be an object with one of "prompt", "messages", "text" and "ids"')
        make = {"prompt": self._pair, "messages": self._chat, "text": self._text, "ids": self._ids}[kinds[0]]
        prompt, answer, given, shingles = make(value, where)
        ids = [*prompt, *answer[: self.tokens]]
        if not ids:
            raise UsageError(f"{where} is empty, but the model needs at least one token to go on from")
        longest = len(prompt) + self.tokens if self.mode == "decode" else len(ids)
        if longest > self.context:
            raise UsageError(
                f"{where} needs {longest} tokens of context, which has {self.context}: shorten it, give fewer --tokens "
                f"or a larger --context (this model allows up to {self.config.max_position_embeddings})"
            )
        sha256 = hashlib.sha256(json.dumps([kinds[0], given], sort_keys=True).encode()).hexdigest()
        return Prompt(number, sha256, np.array(ids, dtype=np.int32), len(prompt), shingles)

    def _pair(self, value: dict[str, Any], where: str) -> _Parts:
        prompt, completion = self._string(value, "prompt", where), ""
        if self.mode == "teacher":
            completion = self._string(value, "completion", where)
        ids = self._encode(prompt, where), self._encode(completion, where)
        return *ids, [prompt, completion], text_shingles(f"{prompt}\n{completion}")

    def _text(self, value: dict[str, Any], where: str) -> _Parts:
        if self.mode == "decode":
            raise UsageError(
                f'{where} has a "text", which --mode teacher reads: --mode decode needs a "prompt" or "messages"'
            )
        text = self._string(value, "text", where)
        return [], self._encode(text, where), text, text_shingles(text)

    def _chat(self, value: dict[str, Any], where: str) -> _Parts:
        messages = parse_messages(value["messages"], where)
        if self.template is None:
            raise UsageError(
                f'{where} has "messages", but this model has no chat template: give "prompt" or "text"'
            )
        answered = bool(messages) and messages[-1].role == "assistant"
        if self.mode == "teacher" and not answered:
            raise UsageError(
                f"{where} must end with a message of the assistant, which --mode teacher records"
            )
        asked = messages[:-1] if answered else messages
        if not any(message.role == "user" for message in asked):
            raise UsageError(f"{where} has no message of the user before the answer")
        used = messages if self.mode == "teacher" else asked
        prompt, answer = self._render(asked, used)
        # A system message is often the same in all lines, and would make all of them alike.
        said = "\n".join(message.content for message in used if message.role != "system")
        given = [message.for_template() for message in used]
        return self._encode(prompt, where), self._encode(answer, where), given, text_shingles(said)

    def _render(self, asked: list[Message], used: list[Message]) -> tuple[str, str]:
        """The prompt, and what the template makes of the answer up to its end token; the bare answer where the template writes
        past turns otherwise than it asks for the next, as with thoughts."""
        assert self.template is not None
        prompt = self.template.render(asked)
        if used is asked:
            return prompt, ""
        whole = self.template.render(used, add_generation_prompt=False)
        if not whole.startswith(prompt):
            return prompt, used[-1].content
        return prompt, whole.removeprefix(prompt).rstrip("\n")

    def _ids(self, value: dict[str, Any], where: str) -> _Parts:
        ids, end = value["ids"], self.config.vocab_size
        if not isinstance(ids, list) or not all(type(each) is int and 0 <= each < end for each in ids):
            raise UsageError(f'{where} must have a list of token ids from 0 to {end - 1} as "ids"')
        split = value.get("prompt_tokens", len(ids) if self.mode == "decode" else 0)
        if type(split) is not int or not 0 <= split <= len(ids):
            raise UsageError(f'{where} must have 0 to {len(ids)}, the number of its ids, as "prompt_tokens"')
        if self.mode == "decode":
            ids = ids[:split]
        return ids[:split], ids[split:], [ids, split], id_shingles(ids or [0])

    def _encode(self, text: str, where: str) -> list[int]:
        try:
            return encode(self.tokenizer, text)
        except UsageError as error:
            raise UsageError(f"{where}: {error}") from error

    @staticmethod
    def _string(value: dict[str, Any], name: str, where: str) -> str:
        if not isinstance(value.get(name), str):
            raise UsageError(f'{where} must have a string as "{name}"')
        return cast(str, value[name])


# ids of the prompt, ids of the answer, what counts of the line, its shingles
_Parts = tuple[list[int], list[int], object, NDArray[np.uint64]]


def read_file(path: Path) -> bytes:
    """The bytes of a file of prompts. Raises UsageError."""
    try:
        return path.read_bytes()
    except (OSError, ValueError) as error:
        raise UsageError(f"--prompts {path} can not be read: {reason(error)}") from error
