"""Renders chat templates as transformers does, in Jinja's sandbox."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from outrider.errors import ConfigError, InvalidRequestError

Message = Mapping[str, str]  # role, content, perhaps name


class ChatTemplate:
    """A compiled template and the special tokens that it may name."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"The model's chat template is broken: {error}") from error
        self._special_tokens = dict(special_tokens)

    @classmethod
    def load(cls, folder: Path, tokenizer_config: Mapping[str, Any]) -> ChatTemplate | None:
        """Read chat_template.jinja or tokenizer_config.json; None if the model has no template."""
        path = folder / "chat_template.jinja"
        if path.exists():
            source: Any = path.read_text(encoding="utf-8")
        else:
            source = tokenizer_config.get("chat_template")
        if isinstance(source, list):  # several named templates
            source = next((t["template"] for t in source if t.get("name") == "default"), None)
        return cls(source, _special_tokens(tokenizer_config)) if source else None

    def render(self, messages: Sequence[Message]) -> str:
        """Render the conversation as text, up to where the assistant speaks.

        Raises `InvalidRequestError` when the template refuses the messages.
        """
        try:
            return self._template.render(
                messages=list(messages),
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **self._special_tokens,
            )
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise InvalidRequestError(
                f"The model's chat template refused the messages: {error}", param="messages"
            ) from error


class _GenerationTag(Extension):
    """`{% generation %}` marks assistant text for training; here its body is just text."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own declaration

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
    return environment


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _special_tokens(tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """Return bos_token, eos_token and so on; a token is a string or {"content": ...}."""
    tokens = {}
    for name, value in tokenizer_config.items():
        content = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(content, str):
            tokens[name] = content
    return tokens
