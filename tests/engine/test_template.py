"""Chat templates: the real one against transformers' renderer, hostile ones against the sandbox."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from huorn.engine.messages import Message
from huorn.engine.template import ChatTemplate
from huorn.errors import CheckpointError, UsageError

REAL_TEMPLATE = Path(__file__).parents[3] / "shared" / "data" / "qwen3_5.chat_template.jinja"
USER = [Message("user", "hello")]
CONVERSATIONS = {
    "one turn": USER,
    "system": [Message("system", "  Be brief. "), Message("user", "hello\n")],
    "history": [
        Message("user", "1+1?"),
        Message("assistant", "2"),
        Message("user", "and <b>'3'</b> & more?"),
    ],
    "thoughts": [
        Message("user", "1+1?"),
        Message("assistant", "<think>\nadd\n</think>\n\n2"),
        Message("user", "sure?"),
        Message("assistant", "let me see\n</think>\n\nyes"),
    ],
    "unicode": [Message("user", "東京 🦌 e\u0301")],
}


@pytest.fixture
def real_source() -> str:
    if not REAL_TEMPLATE.is_file():
        pytest.skip("shared/data/qwen3_5.chat_template.jinja is not here")
    return REAL_TEMPLATE.read_text(encoding="utf-8")


@pytest.mark.parametrize("thinking", [None, True, False])
@pytest.mark.parametrize("generation_prompt", [True, False])
@pytest.mark.parametrize("name", CONVERSATIONS)
def test_the_released_template_renders_as_in_transformers(
    real_source: str, name: str, generation_prompt: bool, thinking: bool | None
) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    messages = CONVERSATIONS[name]
    flags = {} if thinking is None else {"enable_thinking": thinking}
    (want,), _ = render_jinja_template(
        conversations=[[message.for_template() for message in messages]], chat_template=real_source,
        add_generation_prompt=generation_prompt, **flags,
    )  # fmt: skip
    got = ChatTemplate(real_source, "qwen3_5").render(
        messages, add_generation_prompt=generation_prompt, enable_thinking=thinking
    )
    assert got == want


def test_the_released_template_refuses_with_its_own_words(real_source: str) -> None:
    template = ChatTemplate(real_source, "qwen3_5")
    with pytest.raises(UsageError, match=r"qwen3_5 can not render these messages: No messages provided\."):
        template.render([])
    with pytest.raises(UsageError, match="No user query found"):
        template.render([Message("assistant", "hi")])


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__.__base__ }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ self.__init__.__globals__ }}",
        "{{ lipsum.__globals__['os'].system('id') }}",
        "{{ (''|attr('__class__'))() }}",
        "{{ '{0.__class__.__init__.__globals__}'.format(raise_exception) }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'system'}) }}",
        "{{ messages[0].clear() }}",
    ],
)
def test_nothing_leaves_the_sandbox(source: str) -> None:
    with pytest.raises(UsageError, match="the template tries to leave the template sandbox"):
        ChatTemplate(source, "the template").render(USER)


def test_an_unsafe_attribute_is_undefined() -> None:
    source = "{{ ''|attr('__class__') }}{{ ''|attr('__class__') is defined }}"
    assert ChatTemplate(source, "the template").render(USER) == "False"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ raise_exception('not today') }}", "not today"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ messages[0] + 1 }}", "unsupported operand"),
        ("{{ nothing.here }}", "undefined"),
        ("{{ strftime_now('%Y') }}", "undefined"),
        ("{% include 'other.jinja' %}", "loader"),
        ("{% for i in range(10 ** 9) %}{{ i }}{% endfor %}", "too big"),
        ("{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}", "16,777,216 characters"),
        ("{{ 'x' * 10 ** 15 }}", "16,777,216 parts"),
        ("{{ 10 ** 15 * [1] }}", "16,777,216 parts"),
        # constants, which Jinja would compute while it compiles
        ("{{ 9 ** (9 ** 9) }}", "4,096 bits"),
        ("{% set x = 9 ** (9 ** 9) %}", "4,096 bits"),
        ("{% if (-3) ** 99999999999 %}{% endif %}", "4,096 bits"),
        ("{% set n = namespace(n=3) %}{% for i in range(60) %}{% set n.n = n.n * n.n %}{% endfor %}", "4,096 bits"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    ],
)  # fmt: skip
def test_whatever_a_template_raises_is_one_sentence(source: str, reason: str) -> None:
    with pytest.raises(UsageError, match=f"the template .*{reason}"):
        ChatTemplate(source, "the template").render(USER)


@pytest.mark.parametrize("source", [
        "{% if %}", "{{ 'open", "{% for m in messages %}", "{% nonsense %}",
        "{% break %}", "{% macro f(a, a) %}{% endmacro %}", "{{ " + "9" * 5000 + " }}", "{{ " + "(" * 5000,
        "{% for i in 'a' %}" * 60 + "{% endfor %}" * 60, "{% if a %}" * 2000 + "{% endif %}" * 2000,
    ],
    ids=lambda source: source[:20],
)  # fmt: skip
def test_invalid_syntax_is_found_when_loading(source: str) -> None:
    with pytest.raises(CheckpointError, match=r"the template is not a valid chat template: .") as caught:
        ChatTemplate(source, "the template")
    assert "<template>" not in str(caught.value)


def test_small_numbers_are_still_computed() -> None:
    source = "{{ 2 ** 10 }} {{ 1 ** 99999 }} {{ 2 ** -1 }} {{ 1.5 * 2 }} {{ 'ab' * 2 }} {{ [1] * 2 }} {{ 'a' * -1 }} {{ 3 * 4 }}"
    assert ChatTemplate(source, "t").render(USER) == "1024 1 0.5 3.0 abab [1, 1]  12"


def test_tojson_is_plain_json() -> None:
    text = ChatTemplate("{{ messages|tojson }}", "t").render([Message("user", "<b> & 'é'")])
    assert text == '[{"role": "user", "content": "<b> & \'é\'"}]'


def test_blocks_leave_no_blank_lines() -> None:
    assert ChatTemplate("{% if true %}\nyes\n    {% endif %}\nno", "t").render(USER) == "yes\nno"


def write(directory: Path, config: object, jinja: str | None = None) -> Path:
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    if jinja is not None:
        (directory / "chat_template.jinja").write_text(jinja)
    return directory


def test_where_a_template_is_found(tmp_path: Path) -> None:
    assert ChatTemplate.load(tmp_path) is None
    assert ChatTemplate.load(write(tmp_path, {})) is None
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "named"}]
    for config, jinja, want in (
        ({"chat_template": "inline"}, None, "inline"),
        ({"chat_template": named}, None, "named"),
        ({"chat_template": [{"name": ["x"], "template": "odd"}, *named]}, None, "named"),
        ({"chat_template": "inline"}, "file", "file"),
        ({"eos_token": {"content": "<end>"}, "bos_token": "<s>"}, "{{ bos_token + eos_token }}", "<s><end>"),
    ):
        template = ChatTemplate.load(write(tmp_path, config, jinja))
        assert template is not None
        assert template.render(USER) == want


@pytest.mark.parametrize("config", [{"chat_template": 5}, ["a list"]])
def test_a_config_of_another_kind(tmp_path: Path, config: object) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json"):
        ChatTemplate.load(write(tmp_path, config))


def test_a_template_that_is_no_utf8(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja can not be read"):
        ChatTemplate.load(tmp_path)
