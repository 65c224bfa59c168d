"""Chat templates: what they may use, and what is refused."""

from datetime import datetime

import pytest

from text import ChatTemplate, ChatTemplateError, Message
from text.chat_template import MAX_RENDERED_CHARACTERS, MAX_TEMPLATE_CHARACTERS

HELLO = [Message("user", "<b>Hello</b>"), Message("assistant", "Hi")]


def render(source: str, messages: list[Message] = HELLO, **tokens: str) -> str:
    return ChatTemplate(source, tokens, now=lambda: datetime(2025, 7, 1)).render(messages)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% for m in messages %}{{ m.role }}:{{ m['content'] }};{% endfor %}", "user:<b>Hello</b>;assistant:Hi;"),
        ("{{ bos_token }}{{ messages | length }}{{ add_generation_prompt }}", "<s>2True"),
        ("{{ strftime_now('%d %b %Y') }}", "01 Jul 2025"),
        ("{{ messages[0] | tojson }}", '{"role": "user", "content": "<b>Hello</b>"}'),
        ("{{ {'b': 1, 'a': 'é'} | tojson(indent=1, sort_keys=true) }}", '{\n "a": "é",\n "b": 1\n}'),
        ("{% for m in messages %}{% if loop.index0 %}{% break %}{% endif %}{{ m.role }}{% endfor %}", "user"),
        ("{% for m in messages %}\n  {% if not loop.last %}{% continue %}{% endif %}\n{{ m.role }}\n{% endfor %}", "assistant\n"),
        ("a{% generation %}{{ messages[1].content }}{% endgeneration %}b", "aHib"),
        ("{% if tools is none and not documents %}plain{% endif %}", "plain"),
        (
            "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n * 2 }}",
            "4",
        ),
        ("{{ [1] * 3 }}{{ 2 * 'ab' }}{{ '-' * 3 }}{{ 1.5 * 2 }}", "[1, 1, 1]abab---3.0"),
    ],
)
def test_what_templates_use_works(source: str, expected: str) -> None:
    assert render(source, bos_token="<s>") == expected


def test_the_templates_own_words_reach_the_caller() -> None:
    source = "{% if messages[0].role != 'system' %}{{ raise_exception('The first message must be from system') }}{% endif %}"
    with pytest.raises(ChatTemplateError, match="refuses these messages: The first message must be from system"):
        render(source)


def test_the_generation_prompt_can_be_left_out() -> None:
    template = ChatTemplate("{% if add_generation_prompt %}ask{% else %}end{% endif %}")
    assert (template.render(HELLO), template.render(HELLO, add_generation_prompt=False)) == ("ask", "end")


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.append(1) }}",  # the sandbox is immutable
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ 9 ** 9 ** 9 }}",
        "{{ 'x' * 10000000000 }}",
        "{{ 10000000000 * [1] }}",
        "{{ messages[0].content * 9999999 }}",
        "{{ undefined_function() }}",
        "{{ messages[9].role }}",
        "{{ messages[0].role + 1 }}",
        "{{ 1 // 0 }}",
        "{% for i in range(10000000000) %}x{% endfor %}",
        "{% for a in range(90000) %}{% for b in range(90000) %}xxxxxxxxxxxxxxx{% endfor %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% include 'other' %}",
    ],
)
def test_hostile_or_broken_templates_end_in_one_typed_error(source: str) -> None:
    with pytest.raises(ChatTemplateError, match="chat"):
        render(source)


@pytest.mark.parametrize("source", ["{% if %}", "{{ 'open", "{% for x in %}", "{% nonsense %}"])
def test_a_template_that_does_not_compile(source: str) -> None:
    with pytest.raises(ChatTemplateError, match="does not compile"):
        ChatTemplate(source)


def test_sizes_are_bounded() -> None:
    with pytest.raises(ChatTemplateError, match=f"at most {MAX_TEMPLATE_CHARACTERS}"):
        ChatTemplate("x" * (MAX_TEMPLATE_CHARACTERS + 1))
    with pytest.raises(ChatTemplateError, match=f"over {MAX_RENDERED_CHARACTERS} characters"):
        render("{{ messages[0].content }}!", [Message("user", "x" * MAX_RENDERED_CHARACTERS)])
    with pytest.raises(ChatTemplateError, match="at least 1 message"):
        render("x", [])


@pytest.mark.slow
def test_equals_the_transformers_rendering_of_the_default_model() -> None:
    from tests.model_files import default_tokenizer

    utilities = pytest.importorskip("transformers.utils.chat_template_utils")
    chat = default_tokenizer().chat
    assert chat is not None
    for messages in ([HELLO[0]], HELLO, [Message("system", "s"), *HELLO, Message("user", "again")]):
        as_dicts = [{"role": message.role, "content": message.content} for message in messages]
        theirs, _ = utilities.render_jinja_template([as_dicts], chat_template=chat.source, add_generation_prompt=True)
        assert chat.render(messages) == theirs[0]
