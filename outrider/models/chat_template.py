"""Chat templates, rendered by transformers itself."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import jinja2

from outrider.errors import ConfigError, InvalidRequestError
from outrider.models.files import read_text

Message = Mapping[str, Any]
"""A turn as templates know it: role, content (None beside tool calls), perhaps more."""

RESERVED: Final = frozenset(
    {
        *("conversations", "messages", "tools", "documents", "chat_template"),
        *("add_generation_prompt", "continue_final_message", "return_assistant_tokens_mask"),
    }
)
"""Names that a conversation's variables cannot have."""
_KNOWS_NULL: Final = re.compile(r"""content['"]?\]?\s+is\s+(not\s+)?none""", re.IGNORECASE)

_SPECIAL_TOKENS = (
    *("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"),
)


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a template is given. Arguments of `tool_calls` are objects."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] = ()
    variables: Mapping[str, Any] = field(default_factory=dict)
    """More variables, such as `enable_thinking`; a template ignores those it does not know."""


class ChatTemplate:
    """A template and the special tokens that it may name; `tool_source` where tools are given."""

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], tool_source: str | None = None
    ) -> None:
        self._source = source
        self.tool_source = tool_source or source
        self._special_tokens = dict(special_tokens)
        try:
            self._render(Conversation([]))
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"The model's chat template is broken: {error}") from error
        except Exception:
            pass

    @classmethod
    def load(
        cls,
        folder: Path,
        tokenizer_config: Mapping[str, Any],
        special_tokens_map: Mapping[str, Any],
    ) -> ChatTemplate | None:
        """Read chat_template.jinja, else tokenizer_config.json; None if the model has none.

        Raises `ConfigError` for a template with a syntax error.
        """
        path = folder / "chat_template.jinja"
        if path.exists():
            source: Any = read_text(path)
        else:
            source = tokenizer_config.get("chat_template")
        tool_source = None
        if isinstance(source, list):  # several named templates
            named = {t.get("name"): t["template"] for t in source}
            source, tool_source = named.get("default"), named.get("tool_use")
        if not source:
            return None
        return cls(source, special_tokens(tokenizer_config, special_tokens_map), tool_source)

    def render(self, conversation: Conversation) -> str:
        """Render the conversation as text, up to where the assistant speaks.

        Raises `InvalidRequestError` with whatever the template raised.
        """
        try:
            try:
                return self._render(conversation)
            except TypeError:  # DeepSeek's templates join arguments to text
                texts = _with_argument_texts(conversation)
                if texts is conversation:
                    raise
                return self._render(texts)
        except jinja2.TemplateError as error:  # most are `raise_exception`, in the template's words
            said = str(error)
        except Exception as error:  # a template is a program: it may raise anything
            said = f"{type(error).__name__}: {error}"
        raise InvalidRequestError(
            f"The model's chat template refused the messages: {said}", param="messages"
        )

    def _render(self, conversation: Conversation) -> str:
        # Imported where it is needed: a second of CPU time, and no torch.
        from transformers.utils.chat_template_utils import render_jinja_template

        tools = [dict(tool) for tool in conversation.tools]
        source = self.tool_source if tools else self._source
        # transformers leaves out what is null; templates that ask for it would lose calls.
        kept = {"content"} if _KNOWS_NULL.search(source) else set()
        messages = [
            {name: value for name, value in message.items() if value is not None or name in kept}
            for message in conversation.messages
        ]
        (text,), _ = render_jinja_template(
            [messages],
            tools=tools or None,
            chat_template=source,
            add_generation_prompt=True,
            **self._special_tokens | dict(conversation.variables),
        )
        return str(text)


def _with_argument_texts(conversation: Conversation) -> Conversation:
    """Return the conversation with all calls' arguments as text; itself if it has no calls."""
    messages = [dict(message) for message in conversation.messages]
    found = False
    for message in messages:
        if message.get("tool_calls"):
            found = True
            message["tool_calls"] = [_with_text(call) for call in message["tool_calls"]]
    if not found:
        return conversation
    return Conversation(messages, conversation.tools, conversation.variables)


def _with_text(call: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(call["function"])
    if not isinstance(function["arguments"], str):
        function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
    return {**call, "function": function}


def special_tokens(
    tokenizer_config: Mapping[str, Any], special_tokens_map: Mapping[str, Any]
) -> dict[str, str]:
    """Return the special tokens that templates may name, as transformers reads the two files.

    special_tokens_map.json wins, but counts only where tokenizer_config.json, in its older form,
    lists no `added_tokens_decoder`. A token is a string or {"content": ...}.
    """
    fields = dict(tokenizer_config)
    if "added_tokens_decoder" not in fields:
        fields |= special_tokens_map
    tokens = {}
    for name in _SPECIAL_TOKENS:
        value = fields.get(name)
        content = value.get("content") if isinstance(value, dict) else value
        if isinstance(content, str):
            tokens[name] = content
    return tokens
