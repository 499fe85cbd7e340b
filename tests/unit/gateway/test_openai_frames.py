"""Events of text alone, against those that JSON makes."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from gateway.generation import Chunk
from gateway.openai.choices import Shaper
from gateway.openai.rendering import ChoiceEvents
from gateway.output import OutputToken
from outrider.types import TokenKind

SHAPER = Shaper(
    kind="chat",
    request_id="chatcmpl-1",
    model='a "model" é',
    created=1,
    n=2,
    per_prompt=2,
    aux_info=False,
    token_kinds=False,
    include_usage=False,
    predicted=False,
    with_logprobs=False,
    with_drafts=False,
    spell=lambda _: b"",
    reading=None,
    echoes=(),
)


def chunk(*texts: str) -> Chunk:
    return Chunk(tuple(OutputToken(7, TokenKind.PLAIN, text) for text in texts))


def stream(shaper: Shaper, *choices: int) -> ChoiceEvents:
    """Return the events behind the openings of choices."""
    events = ChoiceEvents(shaper, 2)
    for index in choices:
        events.piece(index, Chunk(()))
    return events


def body(shaper: Shaper, index: int, text: str) -> dict[str, Any]:
    chat = shaper.kind == "chat"
    content = {"delta": {"content": text}} if chat else {"text": text}
    usage = {"usage": None} if shaper.include_usage else {}
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk" if chat else "text_completion",
        "created": 1,
        "model": 'a "model" é',
        "choices": [{"index": index, **content, "logprobs": None, "finish_reason": None}],
        **usage,
    }


@given(st.text(min_size=1), st.booleans(), st.booleans(), st.integers(0, 1))
def test_piece_of_text_alone_is_what_json_makes(
    text: str, chat: bool, with_usage: bool, index: int
) -> None:
    shaper = replace(SHAPER, kind="chat" if chat else "text_completion", include_usage=with_usage)
    events = stream(shaper, index)
    for _ in range(2):  # the frame is made once
        made = json.dumps(body(shaper, index, text), separators=(",", ":"))
        assert events.piece(index, chunk(text)) == b"data: " + made.encode() + b"\n\n"


def test_pieces_of_several_choices_have_their_own_frames() -> None:
    stream_ = stream(SHAPER, 0, 1)
    events = [stream_.piece(index, chunk("a", "b")) for index in (0, 1, 0)]
    assert events[0] == events[2]
    assert [json.loads(event[6:])["choices"][0]["index"] for event in events] == [0, 1, 0]
    assert json.loads(events[1][6:])["choices"][0]["delta"] == {"content": "ab"}


def test_piece_without_text_is_none_at_all() -> None:
    assert stream(SHAPER, 0).piece(0, chunk("")) == b""
    kinds = stream(replace(SHAPER, token_kinds=True), 0).piece(0, chunk(""))
    assert json.loads(kinds[6:])["choices"][0]["tokens"]
