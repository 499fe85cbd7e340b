"""Chat templates, rendered by transformers itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from outrider.errors import ConfigError, InvalidRequestError

Message = Mapping[str, str]  # role, content, perhaps name

_SPECIAL_TOKENS = (
    *("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"),
)


class ChatTemplate:
    """A template and the special tokens that it may name."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._source = source
        self._special_tokens = dict(special_tokens)
        try:
            self._render([])
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
            source: Any = path.read_text(encoding="utf-8")
        else:
            source = tokenizer_config.get("chat_template")
        if isinstance(source, list):  # several named templates
            source = next((t["template"] for t in source if t.get("name") == "default"), None)
        if not source:
            return None
        return cls(source, special_tokens(tokenizer_config, special_tokens_map))

    def render(self, messages: Sequence[Message]) -> str:
        """Render the conversation as text, up to where the assistant speaks.

        Raises `InvalidRequestError` with whatever the template raised.
        """
        try:
            return self._render(messages)
        except jinja2.TemplateError as error:  # most are `raise_exception`, in the template's words
            said = str(error)
        except Exception as error:  # a template is a program: it may raise anything
            said = f"{type(error).__name__}: {error}"
        raise InvalidRequestError(
            f"The model's chat template refused the messages: {said}", param="messages"
        )

    def _render(self, messages: Sequence[Message]) -> str:
        # Imported where it is needed: a second of CPU time, and no torch.
        from transformers.utils.chat_template_utils import render_jinja_template

        (text,), _ = render_jinja_template(
            [[dict(message) for message in messages]],
            chat_template=self._source,
            add_generation_prompt=True,
            **self._special_tokens,
        )
        return str(text)


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
