"""An answer as blocks: stretches of text, stretches of reasoning, and calls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from gateway.answers.events import Arguments, Call, Event, Reasoning
from gateway.answers.formats import Reading
from gateway.answers.parser import AnswerParser


@dataclass(slots=True)
class Block:
    """A block and its text so far; that of a call is its arguments."""

    index: int
    kind: Literal["text", "reasoning", "call"]
    name: str = ""
    call_id: str = ""
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """Return the whole text so far."""
        return "".join(self.pieces)


@dataclass(frozen=True, slots=True)
class Begun:
    """A block begins."""

    block: Block


@dataclass(frozen=True, slots=True)
class Grown:
    """A block has grown by a text."""

    block: Block
    text: str


@dataclass(frozen=True, slots=True)
class Ended:
    """A block has ended; `cut` says that the answer was cut within it."""

    block: Block
    cut: bool = False


Change = Begun | Grown | Ended

_PLAIN = Reading(calls=None, tools={}, marks=None, thinks=False, may_think=False)


class BlockReader:
    """Reads the tokens of one answer. An answer has at least one block, maybe an empty one."""

    def __init__(self, reading: Reading | None, *, with_reasoning: bool = True) -> None:
        """Leave reasoning out unless `with_reasoning`."""
        self._reading = reading or _PLAIN
        self._parser = AnswerParser(self._reading)
        self._with_reasoning = with_reasoning
        self.blocks: list[Block] = []
        self.calls: list[Block] = []
        self._open: Block | None = None

    @property
    def reasoning_tokens(self) -> int:
        """Count the tokens of reasoning so far."""
        return self._parser.reasoning_tokens

    def read(self, texts: Sequence[str], *, last: bool, cut: bool = False) -> Iterator[Change]:
        """Yield what tokens with these texts add.

        `last` says that the answer ends, maybe `cut` off.
        """
        for event in self._parser.read(texts, last=last):
            if not isinstance(event, Reasoning) or self._with_reasoning:
                yield from self._changes(event)
        if last:
            if not self.blocks:
                yield from self._begin(Block(0, "text"))
            yield from self._end(cut=cut)

    def _changes(self, event: Event) -> Iterator[Change]:
        if isinstance(event, Call):
            call_id = self._reading.new_call_id()
            self.calls.append(Block(len(self.blocks), "call", event.name, call_id))
            yield from self._begin(self.calls[-1])
            return
        if isinstance(event, Arguments):
            assert self._open is not None, "arguments follow their call"
        else:
            kind: Literal["text", "reasoning"] = "text"
            if isinstance(event, Reasoning):
                kind = "reasoning"
            if self._open is None or self._open.kind != kind:
                yield from self._begin(Block(len(self.blocks), kind))
        block = self.blocks[-1]
        block.pieces.append(event.text)
        yield Grown(block, event.text)

    def _begin(self, block: Block) -> Iterator[Change]:
        yield from self._end()
        self.blocks.append(block)
        self._open = block
        yield Begun(block)

    def _end(self, *, cut: bool = False) -> Iterator[Change]:
        if self._open is not None:
            yield Ended(self._open, cut)
            self._open = None
