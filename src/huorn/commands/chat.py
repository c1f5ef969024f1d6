"""`huorn chat`: a conversation in the terminal, or line by line from a pipe."""

from __future__ import annotations

import importlib
import signal
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from huorn.commands.model_choice import ModelChoice, context_cost, describe
from huorn.commands.output import ModelText, argument_text, check_json_path, note, write_json
from huorn.commands.run import speed_line
from huorn.engine.conversation import AnswerSettings, Conversation
from huorn.engine.generate import Generation
from huorn.engine.messages import Message, read_messages, write_messages
from huorn.errors import HuornError, UsageError
from huorn.files import decode_utf8

COMMANDS = "/reset forgets the conversation, /save FILE writes it, /quit ends"


def chat(
    choice: ModelChoice,
    settings: AnswerSettings,
    system: str | None,
    load: Path | None,
    json_path: Path | None,
) -> None:
    """Answer lines of stdin until /quit or the end of input. `load` is a conversation written by /save."""
    check_json_path(json_path)
    settings = replace(settings, stop=tuple(argument_text(value, "--stop") for value in settings.stop))
    messages = _opening(system, load)
    with closing(choice.open()) as session:
        talk = _Talk(Conversation(session, settings, messages))
        note(f"{session.directory.name}, {context_cost(session)}; {COMMANDS}; Ctrl-C stops an answer")
        talk.hold()
    answers = {
        "stop": settings.stop,
        "max_tokens": settings.max_tokens,
        "enable_thinking": settings.enable_thinking,
    }
    write_json(
        json_path,
        {"turns": talk.turns, "settings": {**answers, **asdict(settings.sampling), **describe(session)}},
    )


def _opening(system: str | None, load: Path | None) -> list[Message]:
    loaded = read_messages(load) if load is not None else []
    if system is None:
        return loaded
    if any(message.role == "system" for message in loaded):
        raise UsageError(f"--system and the system message in {load} are two: give one of them")
    return [Message("system", argument_text(system, "--system")), *loaded]


class _Talk:
    """Reads lines, answers them or obeys them."""

    def __init__(self, conversation: Conversation) -> None:
        self._conversation = conversation
        self._terminal = sys.stdin.isatty()
        self.turns: list[dict[str, Any]] = []

    def hold(self) -> None:
        """Go on until /quit or the end of input. At a terminal a mistake is answered; in a pipe it ends the chat (HuornError)."""
        for line in self._lines():
            try:
                if line.startswith("/"):
                    if not self._obey(line):
                        return
                elif line.strip():
                    self._answer(line)
            except HuornError as error:
                if not self._terminal:
                    raise
                note(f"error: {error}")
            except KeyboardInterrupt:  # while nothing was being generated
                note("")

    def _answer(self, text: str) -> None:
        generation = self._conversation.ask(text)
        out = ModelText()
        with _interrupts_cancel(generation), suppress(KeyboardInterrupt):
            for piece in generation:
                out.write(piece)
        stats = generation.stats
        out.write("" if stats.text.endswith("\n") else "\n")
        self._conversation.remember(text, stats.text)
        self.turns.append({"prompt": text, **asdict(stats)})
        note(speed_line(stats))

    def _obey(self, line: str) -> bool:
        """Carry out a /command; False ends the chat."""
        command, _, argument = line.strip().partition(" ")
        match command, argument.strip():
            case "/quit", "":
                return False
            case "/reset", "":
                self._conversation.reset()
                note("the conversation starts anew")
            case "/save", file if file:
                write_messages(Path(file), self._conversation.messages)
                note(f"{len(self._conversation.messages)} messages written to {file}")
            case "/save", _:
                note("/save needs the name of a file")
            case _:
                note(f"there is no command {line.strip()!r}: {COMMANDS}")
        return True

    def _lines(self) -> Iterator[str]:
        if not self._terminal:
            for number, data in enumerate(sys.stdin.buffer, start=1):
                yield decode_utf8(data, f"line {number} of stdin").rstrip("\r\n")
            return
        with suppress(ImportError):
            importlib.import_module("readline")  # gives input() line editing and history
        while True:
            try:
                yield input("> " if sys.stdout.isatty() else "")
            except UnicodeDecodeError as error:  # the line is gone, the chat is not
                wrong = error.object[error.start]
                note(f"error: the line is not {error.encoding.upper()}: byte {error.start} is 0x{wrong:02x}")
            except EOFError:
                note("")
                return
            except KeyboardInterrupt:
                note("\n/quit or Ctrl-D ends the chat")


@contextmanager
def _interrupts_cancel(generation: Generation) -> Iterator[None]:
    """Let Ctrl-C end the answer between two tokens, a second one at once, as when a long prompt is read."""

    def cancel(*_: object) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        generation.cancel()

    before = signal.signal(signal.SIGINT, cancel)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
