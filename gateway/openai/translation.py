"""Requests of other APIs as chats, and their names of a chat's parameters."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, TypeVar

from pydantic import BaseModel

from gateway.openai.parse import parse, validated
from gateway.openai.requests import ChatRequest
from outrider.errors import InvalidRequestError

_SHARED: Final = frozenset(
    {
        *("model", "stream", "temperature", "top_p", "top_k", "min_p", "seed", "logit_bias"),
        *("presence_penalty", "frequency_penalty", "repetition_penalty"),
        *("stop_token_ids", "ignore_eos", "min_tokens", "structured_outputs", "prediction"),
        *("extra_config", "aux_info", "speculation", "chat_template_kwargs"),
        *("thinking_token_budget", "include_reasoning", "prompt_cache_key"),
    }
)
"""Parameters of chats that other APIs take under the same names."""


_TAGS: Final = frozenset(
    {
        *("message", "function_call", "function_call_output", "reasoning", "item_reference"),
        *("input_text", "output_text", "refusal", "function", "namespace", "allowed_tools"),
        *("text", "thinking", "tool_use", "tool_result", "json_object", "json_schema"),
        *("auto", "any", "tool", "none", "enabled", "disabled", "adaptive"),
    }
)
"""Types of the objects in bodies of other APIs."""

M = TypeVar("M", bound=BaseModel)
E = TypeVar("E", bound=Exception)


def read(kind: type[M], body: bytes | Mapping[str, Any], allowed: Mapping[str, str]) -> M:
    """Read another API's body; `allowed` says what fields of several types may be.

    Raises `InvalidRequestError` that names the parameter at fault.
    """
    return validated(kind, body, allowed, _TAGS)


def as_chat(
    fields: Mapping[str, Any],
    others: Mapping[str, Any],
    names: Mapping[str, str],
    kind: type[ChatRequest] = ChatRequest,
) -> ChatRequest:
    """Return the chat with these `fields`, and with the `others` of the client's as they came.

    `names` are the client's, by the chat's. Raises `InvalidRequestError`.
    """
    for name, value in others.items():
        if value is not None and name in ChatRequest.model_fields and name not in _SHARED:
            instead = f"; use {names[name]}" if name in names else ""
            raise InvalidRequestError(
                f"Unrecognized request argument: {name}{instead}.", param=name
            )
    given = {name: value for name, value in fields.items() if value is not None}
    with named(names):
        return parse(kind, {**others, **given})


def renamed(error: E, names: Mapping[str, str]) -> E:
    """Return the error with the client's names of a chat's parameters."""
    if not isinstance(error, InvalidRequestError):
        return error
    message, param = error.message, error.param
    if param is not None and (name := names.get(param.partition(".")[0])) is not None:
        if message.startswith(param):
            message = f"{name}{message.removeprefix(param)}"
        param = name
    for name, theirs in names.items():
        if "_" in name:  # no word of plain English
            message = re.sub(rf"(?<![\w.]){name}\b", theirs, message)
    return type(error)(message, param=param, reason=error.reason)


@contextmanager
def named(names: Mapping[str, str]) -> Iterator[None]:
    """Rename the parameters in errors of the body."""
    try:
        yield
    except InvalidRequestError as error:
        raise renamed(error, names) from error
