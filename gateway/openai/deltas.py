"""A chat's answer as the fields of a message, whole or growing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from gateway.answers.events import Call, Content, Event, Reasoning
from gateway.answers.formats import Reading
from gateway.answers.parser import AnswerParser

_CONTENT = "content"
_REASONING = ("reasoning_content", "reasoning")  # clients read the one or the other


@dataclass(frozen=True, slots=True)
class MessageReading:
    """The way to read one request's answers, and the parts of them that are told."""

    reading: Reading
    with_reasoning: bool


class MessageReader:
    """Reads one choice's text as it comes."""

    def __init__(self, how: MessageReading) -> None:
        self._how = how
        self._parser = AnswerParser(how.reading)
        self._calls = 0

    @property
    def called(self) -> bool:
        """Tell whether the answer has a tool call."""
        return bool(self._calls)

    @property
    def reasoning_tokens(self) -> int:
        """Count the tokens of reasoning so far."""
        return self._parser.reasoning_tokens

    def delta(self, texts: Sequence[str], *, last: bool) -> dict[str, Any]:
        """Return what tokens add to the message, by their texts; `last`: the answer ends."""
        events = self._parser.read(texts, last=last)
        delta: dict[str, Any] = {}
        for event in events:
            for name, value in self._fields(event):
                if name == "tool_calls":
                    _add_call(delta.setdefault(name, []), value)
                else:
                    delta[name] = delta.get(name, "") + value
        return delta

    def _fields(self, event: Event) -> Iterator[tuple[str, Any]]:
        if isinstance(event, Content):
            yield _CONTENT, event.text
        elif isinstance(event, Reasoning):
            if self._how.with_reasoning:
                yield from ((name, event.text) for name in _REASONING)
        elif isinstance(event, Call):
            self._calls += 1
            function = {"name": event.name, "arguments": ""}
            call = {
                "index": self._calls - 1,
                "id": self._how.reading.new_call_id(),
                "type": "function",
            }
            yield "tool_calls", {**call, "function": function}
        else:
            function = {"arguments": event.text}
            yield "tool_calls", {"index": self._calls - 1, "function": function}


class WholeMessage(NamedTuple):
    """A whole answer's message."""

    fields: dict[str, Any]
    called: bool = False  # whether it has tool calls
    reasoning_tokens: int = 0


def message_of(how: MessageReading | None, texts: Sequence[str]) -> WholeMessage:
    """Return a whole answer's message, from the texts of its tokens."""
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts), "refusal": None}
    if how is None:
        return WholeMessage(message)
    reader = MessageReader(how)
    delta = reader.delta(texts, last=True)
    calls = [
        {name: value for name, value in call.items() if name != "index"}
        for call in delta.get("tool_calls", ())
    ]
    content = delta.get(_CONTENT)
    message[_CONTENT] = content if content is not None or calls else ""
    for name in _REASONING:
        if name in delta:
            message[name] = delta[name]
    if calls:
        message["tool_calls"] = calls
    return WholeMessage(message, reader.called, reader.reasoning_tokens)


def _add_call(calls: list[dict[str, Any]], piece: dict[str, Any]) -> None:
    """Add a piece of a call to those of one delta."""
    if calls and calls[-1]["index"] == piece["index"]:
        calls[-1]["function"]["arguments"] += piece["function"]["arguments"]
    else:
        calls.append(piece)
