"""The items of a response's output, and the events by which they grow."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from typing import Any

from gateway.answers.blocks import Begun, Block, Change, Ended, Grown
from gateway.responses_api.items import OPAQUE

_PREFIXES = {"text": "msg", "reasoning": "rs", "call": "fc"}


class Output:
    """Turns the changes of an answer into events, in the order of OpenAI's streams."""

    def __init__(
        self, namespaces: Mapping[str, tuple[str, str]], *, summarizes: bool, returns: bool
    ) -> None:
        """Tell reasoning as its own summary if `summarizes`.

        `returns`: have it in `encrypted_content`, too, from which clients return it. `namespaces`
        and names of functions that are in one go by their full names.
        """
        self._namespaces = namespaces
        self.items: list[dict[str, Any]] = []
        """The items so far; one that still grows is as it began."""
        self._open: Block | None = None
        self._summarizes = summarizes
        self._returns = returns

    def events(self, change: Change) -> Iterator[dict[str, Any]]:
        """Yield the events of a change, without their numbers."""
        block = change.block
        if isinstance(change, Begun):
            self._open = block
            self.items.append(self._item(block))
            yield {
                "type": "response.output_item.added",
                "output_index": block.index,
                "item": self.items[-1],
            }
            if block.kind != "call":
                yield self._part(block, "added")
        elif isinstance(change, Grown):
            yield self._event(block, self._text_name(block), "delta", {"delta": change.text})
        else:
            yield from self._end(change)

    def _end(self, change: Ended) -> Iterator[dict[str, Any]]:
        block = change.block
        self._close("incomplete" if change.cut else "completed")
        whole = "arguments" if block.kind == "call" else "text"
        yield self._event(block, self._text_name(block), "done", {whole: block.text})
        if block.kind != "call":
            yield self._part(block, "done")
        yield {
            "type": "response.output_item.done",
            "output_index": block.index,
            "item": self.items[-1],
        }

    def cut_off(self) -> None:
        """End an item that still grows: no more will come."""
        if self._open is not None:
            self._close("incomplete")

    def _close(self, status: str) -> None:
        block, self._open = self._open, None
        assert block is not None, "a block begins before it ends"
        item = {**self.items[-1], "status": status}
        if block.kind == "call":
            item["arguments"] = block.text
        else:
            if block.kind == "reasoning" and self._returns:
                item["encrypted_content"] = OPAQUE + block.text
            item[self._parts_name(block)] = [self._part_of(block, block.text)]
        self.items[-1] = item

    def _parts_name(self, block: Block) -> str:
        return "summary" if block.kind == "reasoning" and self._summarizes else "content"

    def _part_of(self, block: Block, text: str) -> dict[str, Any]:
        if block.kind == "text":
            return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
        kind = "summary_text" if self._summarizes else "reasoning_text"
        return {"type": kind, "text": text}

    def _part(self, block: Block, what: str) -> dict[str, Any]:
        """Return the event that begins or ends the only part of an item."""
        summary = self._parts_name(block) == "summary"
        name = "reasoning_summary_part" if summary else "content_part"
        part = self._part_of(block, "" if what == "added" else block.text)
        return self._event(block, name, what, {"part": part})

    def _text_name(self, block: Block) -> str:
        if block.kind == "text":
            return "output_text"
        if block.kind == "call":
            return "function_call_arguments"
        return "reasoning_summary_text" if self._summarizes else "reasoning_text"

    def _event(self, block: Block, name: str, what: str, fields: dict[str, Any]) -> dict[str, Any]:
        event = {
            "type": f"response.{name}.{what}",
            "item_id": self.items[block.index]["id"],
            "output_index": block.index,
            **fields,
        }
        if block.kind != "call":
            event[f"{self._parts_name(block)}_index"] = 0
        if name == "output_text":
            event["logprobs"] = []
        return event

    def _item(self, block: Block) -> dict[str, Any]:
        """Return an item as it begins."""
        item: dict[str, Any] = {
            "id": f"{_PREFIXES[block.kind]}_{uuid.uuid4().hex}",
            "status": "in_progress",
        }
        if block.kind == "text":
            return {**item, "type": "message", "role": "assistant", "content": []}
        if block.kind == "reasoning":
            return {**item, "type": "reasoning", "summary": [], "content": []}
        call = {"type": "function_call", "call_id": block.call_id, "arguments": ""}
        if block.name not in self._namespaces:
            return {**item, **call, "name": block.name}
        namespace, name = self._namespaces[block.name]
        return {**item, **call, "name": name, "namespace": namespace}
