"""How many completions an engine in this process is given at once."""

from __future__ import annotations

import asyncio

import pytest

from outrider.config import MAX_WAITING
from outrider.offline.places import Places


@pytest.mark.parametrize(("max_num_seqs", "room"), [(8, 16), (1024, MAX_WAITING)])
async def test_places_when_taken_are_no_more_than_the_engine_queues(
    max_num_seqs: int, room: int
) -> None:
    places = Places(max_num_seqs)
    await places.take(room)
    another = asyncio.create_task(places.take(1))
    await asyncio.sleep(0)
    assert not another.done()
    places.give_back(room)
    await another
