"""Chat templates: the helpers they are written for work, and nothing else can be reached."""

from __future__ import annotations

import datetime

import pytest

from engine.chat import ChatError, ChatTemplate

HI = [("user", "hi")]


def _render(source: str, messages: list[tuple[str, str]] | None = None) -> str:
    return ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}).render(messages or HI)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ bos_token }}{{ messages[0]['content'] }}{{ eos_token }}", "<s>hi</s>"),
        ("{% if add_generation_prompt %}go{% endif %}", "go"),
        ("{% if tools is not none %}tools{% else %}none{% endif %}", "none"),
        ("{% for m in messages %}\n  {{ m.role }}\n{% endfor %}\n", "  user\n"),  # trim_blocks, lstrip_blocks
        ("{% for i in range(9) %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}", "012"),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}!", "hi!"),
        ("{{ {'a': 'é<b>'} | tojson }}", '{"a": "é<b>"}'),
        ("{{ [1] | tojson(indent=2) }}", "[\n  1\n]"),
        ("{{ messages[0].content.strip().split('i')[0] }}", "h"),
        (
            "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = 7 %}{% endfor %}{{ ns.n }}",
            "7",
        ),
    ],
)
def test_templates_can_do_what_they_are_written_for(source: str, text: str) -> None:
    assert _render(source) == text


def test_the_date_is_todays() -> None:
    before = datetime.date.today().isoformat()
    shown = _render("{{ strftime_now('%Y-%m-%d') }}")
    assert before <= shown <= datetime.date.today().isoformat()


def test_a_template_can_refuse_a_conversation() -> None:
    with pytest.raises(ChatError, match="refuses this conversation: roles must alternate"):
        _render("{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ '%s' % messages.__class__.__init__.__globals__ }}",
        "{% for i in range(100000000) %}x{% endfor %}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_a_template_cannot_leave_its_sandbox(source: str) -> None:
    with pytest.raises(ChatError, match="chat template failed"):
        _render(source)


@pytest.mark.parametrize(
    "source", ["{{ strftime_now.__globals__ }}", "{{ '{0.__class__}'.format(messages) }}"]
)
def test_what_is_unsafe_is_undefined(source: str) -> None:
    assert _render(source) == ""


def test_failures_are_told() -> None:
    with pytest.raises(ChatError, match="cannot be read"):
        ChatTemplate("{% for %}", {})
    with pytest.raises(ChatError, match="failed: division by zero"):
        _render("{{ 1 / 0 }}")
    with pytest.raises(ChatError, match="failed"):
        _render("{{ nothing.at.all }}")
