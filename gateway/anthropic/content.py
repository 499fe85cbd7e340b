"""Blocks of content, as the turns of a chat."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import from_json

from gateway.openai.request_objects import HARMLESS_IN_MESSAGES, Items, Strict, text_or_list
from outrider.errors import InvalidRequestError


class _Noted(Strict):
    harmless = HARMLESS_IN_MESSAGES | {"citations", "caller", "parsed_output"}


class Text(_Noted):
    """A text."""

    type: Literal["text"]
    text: str


def _texts(value: Any) -> Any:
    return text_or_list(value, lambda text: {"type": "text", "text": text}, "blocks")


class Thinking(_Noted):
    """Reasoning of an earlier answer."""

    harmless = _Noted.harmless | {"signature"}

    type: Literal["thinking"]
    thinking: str


class ToolUse(_Noted):
    """A call of an earlier answer."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


TextBlocks = Annotated[Items[Text], BeforeValidator(lambda value: _texts(value or []))]


class ToolResult(_Noted):
    """The result of a called tool. Templates have no place for `is_error`."""

    harmless = _Noted.harmless | {"is_error"}

    type: Literal["tool_result"]
    tool_use_id: str
    content: TextBlocks = Field(default_factory=list)


Block = Annotated[Text | Thinking | ToolUse | ToolResult, Field(discriminator="type")]


class Message(_Noted):
    """A turn of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[Items[Block], BeforeValidator(_texts)]


def turns(system: Iterable[Text], messages: Iterable[Message]) -> list[dict[str, Any]]:
    """Return the messages of a chat. Raises `InvalidRequestError`."""
    made: list[dict[str, Any]] = []
    if text := _join(system):
        made.append({"role": "system", "content": text})
    last = ""
    for number, message in enumerate(messages):
        last = message.role
        place = f"messages.{number}.content"
        if message.role == "assistant":
            made.append(_answer(message.content, place))
        else:
            made += _question(message.role, message.content, place)
    if last == "assistant":
        raise InvalidRequestError(
            "messages: an answer that is begun is not continued here. End with a turn of the user.",
            param="messages",
        )
    return made


def _join(texts: Iterable[Text]) -> str:
    return "".join(text.text for text in texts)


def _answer(blocks: Sequence[Block], place: str) -> dict[str, Any]:
    thoughts = [block.thinking for block in blocks if isinstance(block, Thinking)]
    turn: dict[str, Any] = {
        "role": "assistant",
        "content": _join(block for block in blocks if isinstance(block, Text)),
        **({"reasoning_content": "".join(thoughts)} if thoughts else {}),
    }
    for number, block in enumerate(blocks):
        if isinstance(block, ToolUse):
            function = {"name": block.name, "arguments": block.input}
            call = {"id": block.id, "type": "function", "function": function}
            turn.setdefault("tool_calls", []).append(call)
        elif isinstance(block, ToolResult):
            raise _misplaced(block, f"{place}.{number}", "user")
    return turn


def _question(role: str, blocks: Iterable[Block], place: str) -> Iterator[dict[str, Any]]:
    """Yield the turns of a message that is no answer: texts together, results one by one."""
    texts: list[Text] = []
    for number, block in enumerate(blocks):
        if isinstance(block, Text):
            texts.append(block)
        elif isinstance(block, ToolResult) and role == "user":
            if texts:
                yield {"role": role, "content": _join(texts)}
                texts = []
            content = _join(block.content)
            yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}
        else:
            raise _misplaced(
                block, f"{place}.{number}", "user" if block.type == "tool_result" else "assistant"
            )
    if texts:
        yield {"role": role, "content": _join(texts)}


def _misplaced(block: Block, place: str, role: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{place}: a block of type {block.type} belongs to a turn of the {role}.", param=place
    )


def input_of(arguments: str) -> dict[str, Any]:
    """Return a call's arguments as an object, as far as the model wrote them.

    Other arguments go under INVALID_JSON, as Anthropic's documentation of tools advises.
    """
    try:
        value = from_json(arguments, allow_partial=True) if arguments else {}
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {"INVALID_JSON": arguments}
