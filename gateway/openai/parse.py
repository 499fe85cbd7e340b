"""Request bodies of the OpenAI API as they come: read, or refused by the parameter's name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from gateway.openai.other_fields import HARMLESS, INSTEAD, LORA, NEUTRAL, NEUTRAL_IN
from gateway.openai.request_objects import MUST_BE
from gateway.openai.requests import Request
from outrider.errors import InvalidRequestError

_MISSING = {
    "messages": 'send "messages": [{"role": "user", "content": "..."}] rather than a text, or the '
    "text as the prompt of /v1/completions"
}
# Fields of several types: the errors of each would say less.
_ALLOWED = {
    "prompt": "a string, a list of strings, a list of token ids or a list of such lists",
    "stop": "a string or a list of strings",
    "tool_choice": 'none, auto, required or {"type": "function", "function": {"name": ...}}',
    "messages.tool_calls.function.arguments": "a JSON text, or the object",
    "messages.content": "a string or a list of text parts; images, audio and files are not read",
    "prediction.content": "a string or a list of text parts",
    "speculation.references": "a list of strings or lists of token ids",
    "structured_outputs.json": "a JSON schema, as an object or a string",
    "extra_config.sp_edit": "0 or 1",
}

M = TypeVar("M", bound=BaseModel)
R = TypeVar("R", bound=Request)


def parse(kind: type[R], body: bytes | Mapping[str, Any]) -> R:
    """Parse `body`, JSON or its fields.

    Raises `InvalidRequestError` that names the parameter at fault.
    """
    request = validated(kind, body)
    for name, value in (request.model_extra or {}).items():
        if name in HARMLESS or value is None:
            continue
        neutral = NEUTRAL.get(name, NEUTRAL_IN[kind.operation].get(name))
        if neutral is None or value not in neutral:
            raise _unsupported(name, known=neutral is not None)
    if request.stream_options is not None and not request.stream:
        raise InvalidRequestError(
            "stream_options goes only with stream: true.", param="stream_options"
        )
    if request.draft_trees and not request.stream:
        raise InvalidRequestError("draft_trees goes only with stream: true.", param="draft_trees")
    return request


def validated(
    kind: type[M],
    body: bytes | Mapping[str, Any],
    allowed: Mapping[str, str] = _ALLOWED,
    tags: frozenset[str] = frozenset(),
) -> M:
    """Validate `body`, JSON or its fields; `allowed` says what fields of several types may be.

    `tags` are the types of objects that pydantic writes into a field's path. Raises
    `InvalidRequestError` that names the parameter at fault.
    """
    try:
        if isinstance(body, bytes):
            return kind.model_validate_json(body)
        return kind.model_validate(body)
    except ValidationError as error:
        raise _invalid(error, allowed, tags) from error


def _unsupported(name: str, *, known: bool) -> InvalidRequestError:
    if name in INSTEAD:
        said = f"{name} is not supported; use {INSTEAD[name]}."
    elif name in LORA:
        said = f"{name} is not supported: name the adapter as the model."
    elif known:
        said = f"{name} is not supported yet: leave it out."
    else:
        said = f"Unrecognized request argument: {name}."
    return InvalidRequestError(said, param=name)


def _invalid(
    error: ValidationError, advice: Mapping[str, str], tags: frozenset[str]
) -> InvalidRequestError:
    first = error.errors(include_url=False, include_input=False)[0]
    where = [*_fields(first["loc"], tags)]
    if first["type"] == "json_invalid" or not where:
        return InvalidRequestError(f"The body is not a valid JSON object: {first['msg']}.")
    param = ".".join(where)
    if first["type"] == "missing":
        instead = f": {_MISSING[param]}" if param in _MISSING else ""
        return InvalidRequestError(f"{param} is missing{instead}.", param=param)
    if first["type"] == "union_tag_not_found":
        return InvalidRequestError(f"{param}.type is missing.", param=f"{param}.type")
    if first["type"] == "union_tag_invalid":
        found, known = first["ctx"]["tag"][:64], first["ctx"]["expected_tags"]
        return InvalidRequestError(
            f"{param}: the type {found!r} is not supported; {known} are.", param=param
        )
    if first["type"] == MUST_BE:
        return InvalidRequestError(f"{param} must be {first['msg']}.", param=param)
    for end in range(1, len(where) + 1):
        allowed = advice.get(".".join(part for part in where[:end] if not part.isdigit()))
        if allowed is not None:
            field = ".".join(where[:end])
            return InvalidRequestError(f"{field} must be {allowed}.", param=field)
    return InvalidRequestError(f"{param}: {first['msg']}.", param=param)


def _fields(path: tuple[int | str, ...], tags: frozenset[str]) -> Iterator[str]:
    """Yield the names of a path's fields, without types in between."""
    for number, part in enumerate(path):
        if part not in tags or number in (0, len(path) - 1):
            yield str(part)
