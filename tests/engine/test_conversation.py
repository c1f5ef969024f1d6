"""A chat that keeps its state must answer as one that reads everything anew."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from huorn.engine.conversation import AnswerSettings, Conversation
from huorn.engine.messages import Message
from huorn.engine.sampling import Sampler, SamplingSettings
from huorn.engine.session import Session
from huorn.engine.template import ChatTemplate
from huorn.engine.tokenizer import encode
from huorn.errors import UsageError
from huorn.model.precision import Precision

GREEDY = AnswerSettings(SamplingSettings(), max_tokens=12)
REAL_TEMPLATE = Path(__file__).parents[3] / "shared" / "data" / "qwen3_5.chat_template.jinja"
KEEPS_ALL = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}" \
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"  # fmt: skip


@pytest.fixture(scope="module")
def session(tiny_model: Path) -> Session:
    return Session.open(tiny_model, context=512, threads=1, precision=Precision.F32)


def turn(conversation: Conversation, text: str) -> tuple[str, int]:
    """Ask and remember; the answer and how many tokens of the prompt were in the state."""
    generation = conversation.ask(text)
    answer = "".join(generation)
    conversation.remember(text, answer)
    return answer, generation.stats.reused_tokens


@pytest.mark.parametrize("template", ["tiny", "keeps all", "qwen3.5"])
@pytest.mark.parametrize("thinking", [None, True, False])
def test_answers_are_those_of_a_new_conversation(
    session: Session, template: str, thinking: bool | None
) -> None:
    if template == "keeps all":
        session = replace(session, template=ChatTemplate(KEEPS_ALL, "t"))
    elif template == "qwen3.5":
        if not REAL_TEMPLATE.is_file():
            pytest.skip("shared/data/qwen3_5.chat_template.jinja is not here")
        session = replace(session, template=ChatTemplate(REAL_TEMPLATE.read_text(), "t"))
    settings = replace(GREEDY, enable_thinking=thinking)
    conversation = Conversation(session, settings, [Message("system", "Be brief.")])
    for text in ("What is 1 + 1?", "And in French?", "東京"):
        history = list(conversation.messages)
        answer, reused = turn(conversation, text)
        assert "".join(Conversation(session, settings, history).ask(text)) == answer
        if len(history) > 1:  # at least everything before the last answer
            assert session.template is not None
            shared = session.template.render(
                history[:-1], add_generation_prompt=False, enable_thinking=thinking
            )
            assert reused >= len(encode(session.tokenizer, shared)) > 0


def test_an_unchanged_prefix_is_kept_with_the_answer(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer is dictated: that of an untrained model is broken UTF-8, which no template gives back as the same ids."""
    session = replace(session, template=ChatTemplate(KEEPS_ALL, "t"))
    dictated = iter(encode(session.tokenizer, "fine and good<|im_end|>") * 2)
    monkeypatch.setattr(Sampler, "pick", lambda *_: next(dictated))
    conversation = Conversation(session, GREEDY)
    assert turn(conversation, "hello") == ("fine and good", 0)
    assert session.template is not None
    rendered = session.template.render(conversation.messages, add_generation_prompt=False)
    _, reused = turn(conversation, "go on")
    assert reused == len(encode(session.tokenizer, rendered)) - 1  # the end marker was picked but never read


def test_a_cancelled_answer_leaves_a_sound_state(session: Session) -> None:
    conversation = Conversation(session, GREEDY)
    generation = conversation.ask("tell me a story")
    pieces = []
    for piece in generation:
        pieces.append(piece)
        generation.cancel()
    conversation.remember("tell me a story", "".join(pieces))
    history = list(conversation.messages)
    answer, reused = turn(conversation, "go on")
    assert reused > 0
    assert "".join(Conversation(session, GREEDY, history).ask("go on")) == answer


def test_a_question_that_does_not_fit_is_not_remembered(session: Session) -> None:
    conversation = Conversation(session, GREEDY)
    answer, _ = turn(conversation, "hello")
    with pytest.raises(UsageError, match="leaves no room in a context of 512"):
        conversation.ask("long " * 600)
    assert conversation.messages == [Message("user", "hello"), Message("assistant", answer)]


def test_reset_keeps_the_system_message(session: Session) -> None:
    conversation = Conversation(
        session, GREEDY, [Message("system", "Be brief."), Message("user", "a"), Message("assistant", "b")]
    )
    fresh = Conversation(session, GREEDY, [Message("system", "Be brief.")])
    turn(conversation, "c")
    conversation.reset()
    assert conversation.messages == [Message("system", "Be brief.")]
    assert turn(conversation, "hello")[0] == turn(fresh, "hello")[0]


def test_a_seed_fixes_every_answer(session: Session) -> None:
    settings = replace(GREEDY, sampling=SamplingSettings(temperature=1.0, seed=5))
    one, two = Conversation(session, settings), Conversation(session, settings)
    for text in ("hello", "and then?"):
        assert turn(one, text)[0] == turn(two, text)[0]


def test_a_model_without_a_template_can_not_chat(session: Session) -> None:
    with pytest.raises(UsageError, match=r"has no chat template .* use huorn run"):
        Conversation(replace(session, template=None), GREEDY)
