"""Outputs between the event loop and their reader."""

from __future__ import annotations

from typing import cast

import pytest

from gateway.generation import Chunk
from outrider.errors import UnavailableError
from outrider.offline.feed import Feed
from outrider.offline.outputs import Tracker


class OneOutput:
    """Stands in for a tracker that always has something to show."""

    def add(self, _index: int, _chunk: Chunk) -> bool:
        return True

    def take(self) -> str:
        return "output"


def test_feed_that_ends_with_an_error_wakes_its_reader_again() -> None:
    woken: list[None] = []
    feed = Feed(lambda: woken.append(None))
    feed.add(cast("Tracker", OneOutput()), 0, Chunk(()))
    feed.end(UnavailableError("closed"))
    woken.clear()  # both arrived before the reader ran
    outputs, more = feed.take()
    assert len(outputs) == 1
    assert more
    assert len(woken) == 1
    with pytest.raises(UnavailableError):
        feed.take()
