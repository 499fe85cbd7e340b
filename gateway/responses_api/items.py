"""Items of a response's input, as the turns of a chat."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field

from gateway.openai.request_objects import HARMLESS_IN_MESSAGES, Items, Strict, text_or_list
from outrider.errors import InvalidRequestError

_HARMLESS = HARMLESS_IN_MESSAGES | {"phase", "parsed", "logprobs", "prompt_cache_breakpoint"}


OPAQUE: Final = "text:"
"""Begins the `encrypted_content` of reasoning, which clients return unread: its plain text."""

_BETWEEN: Final = {"system": "\n\n", "user": "", "assistant": "", "tool": ""}
"""What stands between the texts of one turn."""


class _Noted(Strict):
    harmless = _HARMLESS


class InputText(_Noted):
    """A text for the model."""

    type: Literal["input_text"]
    text: str


class OutputText(_Noted):
    """A text of the model."""

    type: Literal["output_text"]
    text: str


class Refusal(_Noted):
    """A refusal of the model."""

    type: Literal["refusal"]
    refusal: str


Part = Annotated[InputText | OutputText | Refusal, Field(discriminator="type")]


def _parts(value: Any) -> Any:
    return text_or_list(value, lambda text: {"type": "input_text", "text": text}, "parts")


Parts = Annotated[Items[Part], BeforeValidator(_parts)]


class Message(_Noted):
    """A turn of the conversation."""

    type: Literal["message"]
    role: Literal["user", "assistant", "system", "developer"]
    content: Parts


class FunctionCall(_Noted):
    """A call of an earlier turn."""

    harmless = _HARMLESS | {"parsed_arguments"}

    type: Literal["function_call"]
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str


class FunctionCallOutput(_Noted):
    """The result of a called function."""

    harmless = _HARMLESS | {"name"}

    type: Literal["function_call_output"]
    call_id: str
    output: Parts


class ReasoningText(_Noted):
    """A text of reasoning, or of its summary."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


class Reasoning(_Noted):
    """Reasoning of an earlier turn."""

    type: Literal["reasoning"]
    summary: Items[ReasoningText] | None = None
    content: Items[ReasoningText] | None = None
    encrypted_content: str | None = None


class ItemReference(_Noted):
    """An item that another server would have stored."""

    type: Literal["item_reference"]


Item = Annotated[
    Message | FunctionCall | FunctionCallOutput | Reasoning | ItemReference,
    Field(discriminator="type"),
]


def _items(value: Any) -> Any:
    """Return a list of items, each with its type; a text is a message of the user."""
    items = text_or_list(value, lambda text: {"role": "user", "content": text}, "items")
    return [
        {"type": "message", **each} if isinstance(each, dict) and "role" in each else each
        for each in items
    ]


InputItems = Annotated[Items[Item], BeforeValidator(_items), Field(min_length=1)]


def full_name(namespace: str | None, name: str) -> str:
    """Return the name by which the model knows a function."""
    return name if namespace is None else f"{namespace}.{name}"


def turns(instructions: str | None, items: Iterable[Item]) -> list[dict[str, Any]]:
    """Return the messages of a chat. Raises `InvalidRequestError`.

    `instructions` and the system's messages at the begin are one turn. So are the reasoning, the
    text and the calls of one answer.
    """
    made: list[dict[str, Any]] = []
    if instructions:
        made.append({"role": "system", "content": [instructions]})
    for number, item in enumerate(items):
        if isinstance(item, Message) and item.role != "assistant":
            _add_message(made, item)
        elif isinstance(item, FunctionCallOutput):
            output = [_text(item.output)]
            made.append({"role": "tool", "tool_call_id": item.call_id, "content": output})
        elif isinstance(item, ItemReference):
            raise InvalidRequestError(
                f"input.{number}: items are not stored, so item_reference is not supported. Send "
                "the item itself; clients do so where store is false.",
                param=f"input.{number}",
            )
        else:
            _add_answer(made, item, f"input.{number}")
    for turn in made:  # joined once: a text that grows item by item is copied for each
        for name, between in (("content", _BETWEEN[turn["role"]]), ("reasoning_content", "")):
            if name in turn:
                turn[name] = between.join(turn[name])
    return made


def _text(parts: Iterable[Part]) -> str:
    return "".join(part.refusal if isinstance(part, Refusal) else part.text for part in parts)


def _add_message(made: list[dict[str, Any]], item: Message) -> None:
    text = _text(item.content)
    role = "user" if item.role == "user" else "system"
    if role == "system" and len(made) == 1 and made[0]["role"] == "system":
        made[0]["content"].append(text)
    else:
        made.append({"role": role, "content": [text]})


def _add_answer(
    made: list[dict[str, Any]], item: Message | FunctionCall | Reasoning, place: str
) -> None:
    """Add a part of an answer to the turn that it belongs to, whose texts are lists."""
    turn = made[-1] if made and made[-1]["role"] == "assistant" else None
    has_calls = turn is not None and "tool_calls" in turn
    has_text = turn is not None and "content" in turn
    if (
        turn is None
        or (isinstance(item, Reasoning) and (has_calls or has_text))
        or (isinstance(item, Message) and has_text and not has_calls)
    ):
        turn = {"role": "assistant"}
        made.append(turn)
    if isinstance(item, Reasoning):
        turn.setdefault("reasoning_content", []).append(_reasoning(item, place))
    elif isinstance(item, Message):
        turn.setdefault("content", []).append(_text(item.content))
    else:
        name = full_name(item.namespace, item.name)
        function = {"name": name, "arguments": item.arguments}
        call = {"id": item.call_id, "type": "function", "function": function}
        turn.setdefault("tool_calls", []).append(call)


def _reasoning(item: Reasoning, place: str) -> str:
    hidden, texts = item.encrypted_content, [each.text for each in item.content or ()]
    if not texts and hidden is not None and hidden.startswith(OPAQUE):
        return hidden.removeprefix(OPAQUE)
    texts = texts or [part.text for part in item.summary or ()]
    if not texts and hidden is not None:
        raise InvalidRequestError(
            f"{place}.encrypted_content cannot be read here: another server has encrypted it. "
            "Leave the item out.",
            param=f"{place}.encrypted_content",
        )
    return "".join(texts)
