"""Drafts that the device has made take their places in the rows of a step."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider.vllm.ahead.placed_drafts import PlacedDrafts


@given(st.data())
def test_each_row_gets_as_much_of_its_draft_as_it_has_room_for(data: st.DataObject) -> None:
    count, most = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 8))
    tokens = torch.arange(count * most, dtype=torch.int32).view(count, most)
    num_rows = data.draw(st.integers(1, 8))
    rooms = data.draw(st.lists(st.integers(0, 9), min_size=num_rows, max_size=num_rows))
    sources = [data.draw(st.integers(-1, count - 1)) for _ in rooms]
    lengths = [
        data.draw(st.integers(0, min(room, most))) if source >= 0 else 0
        for room, source in zip(rooms, sources, strict=True)
    ]
    expected = []
    for room, source, length in zip(rooms, sources, lengths, strict=True):
        draft = tokens[source, :length].tolist()
        expected += draft + [-1] * (room - length)
    assert PlacedDrafts.gather(tokens, sources, lengths, rooms).tokens.tolist() == expected
