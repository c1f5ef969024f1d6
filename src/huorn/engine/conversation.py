"""A chat: messages that grow turn by turn over one state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from huorn.engine.generate import Generation, check_limits
from huorn.engine.messages import Message
from huorn.engine.sampling import SamplingSettings
from huorn.engine.session import Session
from huorn.engine.template import ChatTemplate
from huorn.engine.tokenizer import encode
from huorn.errors import UsageError


@dataclass(frozen=True)
class AnswerSettings:
    """What every answer of a conversation has in common."""

    sampling: SamplingSettings
    max_tokens: int
    stop: tuple[str, ...] = ()
    enable_thinking: bool | None = None  # None: the template's own default

    def __post_init__(self) -> None:
        """Raise UsageError at once for what the first question would be refused for."""
        check_limits(self.max_tokens, self.stop)


class Conversation:
    """Renders, asks and remembers.

    The prompt of each answer is a function of the messages alone. Its logits depend a little on what the state had already
    read: the reference backend rounds one token at a time otherwise than a chunk, which in BF16 moves a logit by up to 0.4
    and with it, now and then, a pick. With F32 rounding an answer is a function of the messages and the seed alone.
    """

    def __init__(self, session: Session, settings: AnswerSettings, messages: Sequence[Message] = ()) -> None:
        """Start from `messages`, such as a system message or a saved chat. Raises UsageError without a chat template."""
        if session.template is None:
            raise UsageError(
                f"{session.directory} has no chat template (chat_template.jinja, or chat_template in "
                "tokenizer_config.json), so it can not chat: use huorn run"
            )
        self._template: ChatTemplate = session.template
        self._session = session
        self._settings = settings
        self._state = session.new_state()
        self._first = [message for message in messages if message.role == "system"]
        self.messages = list(messages)

    def ask(self, text: str) -> Generation:
        """Return the generation that answers `text`; nothing is remembered until `remember`. Raises UsageError."""
        messages = [*self.messages, Message("user", text)]
        prompt_ids = self._encode(messages, add_generation_prompt=True)
        asked_ids = self._encode(messages, add_generation_prompt=False)
        settings = self._settings
        return Generation(
            self._session,
            prompt_ids,
            settings.sampling,
            settings.max_tokens,
            settings.stop,
            state=self._state,
            mark_at=len(asked_ids) if prompt_ids[: len(asked_ids)] == asked_ids else None,
        )

    def remember(self, text: str, answer: str) -> None:
        """Append a question and its answer, whole or cut short."""
        self.messages += [Message("user", text), Message("assistant", answer)]

    def reset(self) -> None:
        """Forget everything but the system message."""
        self.messages = list(self._first)

    def _encode(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> list[int]:
        prompt = self._template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            enable_thinking=self._settings.enable_thinking,
        )
        return encode(self._session.tokenizer, prompt)
