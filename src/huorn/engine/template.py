"""The chat template of a checkpoint: messages to prompt text.

A template is foreign code, so it runs in Jinja's sandbox: it sees the messages and flags, can change nothing, and can reach
neither Python's internals nor files. It gets what transformers gives it, apart from the clock: a prompt must not depend on
the day.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from huorn.checkpoint.config import read_json
from huorn.engine.messages import Message
from huorn.errors import CheckpointError, UsageError, reason

# 262,144 tokens of context at 64 characters each; a template that writes more is broken or hostile.
_LONGEST_PROMPT = 16 * 1024 * 1024
_MOST_BITS = 4096  # of a whole number; Python prints at most 14,284
_TOKEN_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token")


class ChatTemplate:
    """A compiled chat template and the special tokens it may name."""

    def __init__(self, source: str, origin: str, special_tokens: Mapping[str, str] | None = None) -> None:
        """Compile `source`; `origin` names it in errors. Raises CheckpointError when it is not valid Jinja."""
        self._origin = origin
        self._special_tokens = dict(special_tokens or {})
        try:
            self._template = _environment().from_string(source)
        except Exception as error:  # Jinja writes Python: what it does not find itself is a SyntaxError or ValueError of that
            why = (
                error.msg if isinstance(error, SyntaxError) else reason(error)
            )  # str() adds a line of that Python
            raise CheckpointError(f"{origin} is not a valid chat template: {why}") from error

    @classmethod
    def load(cls, directory: Path) -> ChatTemplate | None:
        """Return the template of a checkpoint, or None when it has none.

        chat_template.jinja comes first, then `chat_template` in tokenizer_config.json (a string, or a list with one named
        "default"), as in transformers.
        """
        config_path = directory / "tokenizer_config.json"
        config = read_json(config_path) if config_path.is_file() else {}
        tokens = {name: token for name in _TOKEN_NAMES if (token := _token_text(config.get(name)))}
        path = directory / "chat_template.jinja"
        if path.is_file():
            return cls(_read_text(path), str(path), tokens)
        source = config.get("chat_template")
        if isinstance(source, list):
            source = _named_default(source)
        if source is None:
            return None
        if not isinstance(source, str):
            raise CheckpointError(
                f"{config_path}: chat_template must be a string or a list of named templates"
            )
        return cls(source, f"chat_template in {config_path}", tokens)

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        enable_thinking: bool | None = None,
    ) -> str:
        """Return the prompt text of `messages`. `enable_thinking` None leaves the choice to the template.

        Raises UsageError when the template refuses the messages, tries to leave the sandbox, fails or writes without end.
        """
        variables: dict[str, Any] = {
            **self._special_tokens,
            "messages": [message.for_template() for message in messages],
            "add_generation_prompt": add_generation_prompt,
        }
        if enable_thinking is not None:
            variables["enable_thinking"] = enable_thinking
        pieces: list[str] = []
        length = 0
        try:
            for piece in self._template.generate(variables):
                pieces.append(piece)
                length += len(piece)
                if length > _LONGEST_PROMPT:
                    raise jinja2.TemplateError(f"it writes more than {_LONGEST_PROMPT:,} characters")
        except jinja2.exceptions.SecurityError as error:
            raise UsageError(
                f"{self._origin} tries to leave the template sandbox: {reason(error)}"
            ) from error
        except (
            Exception
        ) as error:  # foreign code: whatever it raises (TypeError, MemoryError, ...) is the template's fault
            raise UsageError(f"{self._origin} can not render these messages: {reason(error)}") from error
        return "".join(pieces)


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, in which a short expression can not ask for hours or for all memory.

    Operators that are intercepted are not computed while a template is compiled either.
    """

    intercepted_binops = frozenset(["*", "**"])

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Multiply or raise to a power, unless the result is longer than any prompt or a number of over 4,096 bits."""
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
            if abs(left) > 1 and bits > _MOST_BITS:
                raise jinja2.TemplateError(f"it computes a number of more than {_MOST_BITS:,} bits")
        elif operator == "*" and _length(left) * _length(right) > _LONGEST_PROMPT:
            raise jinja2.TemplateError(f"it repeats something to more than {_LONGEST_PROMPT:,} parts")
        return super().call_binop(context, operator, left, right)


def _length(factor: Any) -> int:
    """How often a factor repeats the other, or how long it is; 0 where it does neither."""
    if isinstance(factor, str | list | tuple):
        return len(factor)
    return factor if isinstance(factor, int) else 0


def _environment() -> ImmutableSandboxedEnvironment:
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"], optimized=False
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    return environment


def _to_json(
    value: object, ensure_ascii: bool = False, indent: int | None = None, sort_keys: bool = False
) -> str:
    """JSON as transformers writes it for templates: Jinja's own filter would escape <, >, & and ' for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _named_default(templates: list[Any]) -> Any:
    """The last template named "default" out of a list of {"name", "template"}; None where none is."""
    named = [t.get("template") for t in templates if isinstance(t, dict) and t.get("name") == "default"]
    return named[-1] if named else None


def _token_text(value: object) -> str | None:
    """A special token in tokenizer_config.json is a string or an object with its `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} can not be read: {reason(error)}") from error
