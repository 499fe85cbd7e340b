"""Blocks of an answer tell what a chat's message tells, however the answer was cut."""

from __future__ import annotations

import pytest

from gateway.answers.blocks import Begun, Block, BlockReader, Ended, Grown
from gateway.openai.deltas import MessageReading, message_of
from tests.support.answers import ANSWERS, reading


def blocks_of(parser: str, pieces: list[str], *, cut: bool = False) -> list[Block]:
    """The blocks, which begin, grow and end in order."""
    reader = BlockReader(reading(parser))
    found: list[Block] = []
    texts: list[str] = []
    cuts: list[bool] = []
    is_open = False
    for number, piece in enumerate(pieces):
        last = number == len(pieces) - 1
        for change in reader.read([piece], last=last, cut=cut):
            if isinstance(change, Begun):
                assert not is_open
                assert change.block.index == len(found)
                found.append(change.block)
                texts.append("")
                is_open = True
            elif isinstance(change, Grown):
                assert is_open
                assert change.text
                texts[-1] += change.text
            else:
                assert isinstance(change, Ended)
                assert is_open
                cuts.append(change.cut)
                is_open = False
    assert not is_open
    assert cuts == [False] * (len(found) - 1) + [cut]
    assert [block.text for block in found] == texts
    assert found == reader.blocks
    return found


@pytest.mark.parametrize(("parser", "name", "text"), ANSWERS)
def test_blocks_are_the_chats_message_in_pieces_of_any_size(
    parser: str, name: str, text: str
) -> None:
    del name
    message = message_of(MessageReading(reading(parser), with_reasoning=True), [text]).fields
    kinds = None
    for size in (*range(1, 17), len(text)):
        pieces = [text[start : start + size] for start in range(0, len(text), size)]
        blocks = blocks_of(parser, pieces, cut=size == 1)
        told = [(block.kind, block.name, block.text) for block in blocks]
        assert kinds is None or told == kinds
        kinds = told
    assert kinds is not None
    assert "".join(text for kind, _, text in kinds if kind == "text") == (message["content"] or "")
    thoughts = "".join(text for kind, _, text in kinds if kind == "reasoning")
    assert thoughts == message.get("reasoning", "")
    assert [(name, text) for kind, name, text in kinds if kind == "call"] == [
        (call["function"]["name"], call["function"]["arguments"])
        for call in message.get("tool_calls", ())
    ]


def test_answer_without_text_has_one_empty_block() -> None:
    (block,) = blocks_of("hermes", [""])
    assert (block.kind, block.text) == ("text", "")
