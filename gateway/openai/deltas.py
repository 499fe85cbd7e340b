"""A chat's answer as the fields of a message, whole or growing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from gateway.answers.blocks import Block, BlockReader, Ended, Grown
from gateway.answers.formats import Reading

_NAMES = {"text": ("content",), "reasoning": ("reasoning_content", "reasoning")}
"""Kinds of blocks -> their fields; of reasoning clients read the one or the other."""


@dataclass(frozen=True, slots=True)
class MessageReading:
    """The way to read one request's answers, and the parts of them that are told."""

    reading: Reading
    with_reasoning: bool

    def reader(self) -> BlockReader:
        """Create the reader of one answer."""
        return BlockReader(self.reading, with_reasoning=self.with_reasoning)


def delta_of(reader: BlockReader, texts: Sequence[str], *, last: bool) -> dict[str, Any]:
    """Return what tokens add to the message, by their texts; `last`: the answer ends."""
    delta: dict[str, Any] = {}
    for change in reader.read(texts, last=last):
        block, grown = change.block, change.text if isinstance(change, Grown) else ""
        if block.kind != "call":
            for name in _NAMES[block.kind] if grown else ():
                delta[name] = delta.get(name, "") + grown
        elif not isinstance(change, Ended):
            calls: list[dict[str, Any]] = delta.setdefault("tool_calls", [])
            index = len(reader.calls) - 1
            if not isinstance(change, Grown):
                calls.append({"index": index, **_call(block)})
            elif not calls or calls[-1]["index"] != index:
                calls.append({"index": index, "function": {"arguments": grown}})
            else:
                calls[-1]["function"]["arguments"] += grown
    return delta


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
    reader = how.reader()
    delta = delta_of(reader, texts, last=True)
    message["content"] = None if reader.calls else ""
    if reader.calls:
        delta["tool_calls"] = [_call(block) for block in reader.calls]
    return WholeMessage({**message, **delta}, bool(reader.calls), reader.reasoning_tokens)


def _call(block: Block) -> dict[str, Any]:
    """Return a call, with its arguments so far."""
    function = {"name": block.name, "arguments": block.text}
    return {"id": block.call_id, "type": "function", "function": function}
