"""Chat templates: a conversation becomes the text the model was trained on.

A template comes with the model, so it runs in Jinja's immutable sandbox: it can neither reach Python's
internals nor change what it is given. The helpers it may call are those that templates are written for.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class ChatError(Exception):
    """A template is broken, or refuses this conversation."""


class ChatTemplate:
    """One compiled template. ``special_tokens`` are the names it may use, such as bos_token."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens)
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise ChatError(f"the model's chat template cannot be read: {error}") from error

    def render(self, messages: Sequence[tuple[str, str]]) -> str:
        """The conversation of (role, content) pairs, ending where the model's answer begins."""
        try:
            return self._template.render(
                messages=[{"role": role, "content": content} for role, content in messages],
                add_generation_prompt=True,
                tools=None,
                documents=None,
                **self._special_tokens,
            )
        except ChatError:
            raise
        except Exception as error:  # a template can fail in any way that Python can
            raise ChatError(f"the model's chat template failed: {error}") from error


def _environment() -> ImmutableSandboxedEnvironment:
    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    env.filters["tojson"] = _tojson
    env.globals["raise_exception"] = _raise
    env.globals["strftime_now"] = _strftime_now
    return env


class _GenerationBlock(Extension):
    """``{% generation %}...{% endgeneration %}`` marks what to train on; here it is plain text."""

    tags = {"generation"}  # noqa: RUF012  # Jinja's own attribute, read at class creation

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise(message: str) -> NoReturn:
    raise ChatError(f"the model's chat template refuses this conversation: {message}")


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)
