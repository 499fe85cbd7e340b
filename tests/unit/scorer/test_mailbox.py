"""A step's commits reach the mailboxes of streams."""

from __future__ import annotations

import asyncio

from outrider.types import Commit, FinishReason, TokenKind
from scorer_service.mailbox import Deliveries, Mailbox

MANY = 40  # more than are delivered at once


def commit(base_len: int, finish_reason: FinishReason | None = None) -> Commit:
    return Commit(1, base_len, (7,), (TokenKind.PLAIN,), 0, finish_reason)


async def test_deliveries_to_streams_that_want_more_tokens_take_no_turn() -> None:
    boxes = [Mailbox(interval=3) for _ in range(MANY)]
    deliveries = Deliveries()
    for box in boxes:
        assert box.put(commit(0)), "the first message is sent at once"
        box.wake()
        assert len(await box.take()) == 1
    for box in boxes:
        deliveries.put(box, commit(1))
    assert all(box.holds_commits for box in boxes)
    taking = [asyncio.create_task(box.take()) for box in boxes]
    deliveries.finish()
    await asyncio.sleep(0)
    assert not any(task.done() for task in taking), "they want more tokens"
    for box in boxes:
        deliveries.put(box, commit(2, FinishReason.LENGTH))
    deliveries.deliver()
    await asyncio.sleep(0)
    assert 0 < sum(task.done() for task in taking) < MANY, "ends wake streams, in their turn"
    deliveries.finish()
    assert [len(await task) for task in taking] == [2] * MANY


async def test_mailbox_woken_for_what_was_taken_waits_for_more() -> None:
    box = Mailbox()
    assert box.put(commit(0))
    box.wake()
    assert box.put(commit(1))  # its turn to be woken comes later
    assert len(await box.take()) == 2
    box.wake()
    taking = asyncio.create_task(box.take())
    await asyncio.sleep(0)
    assert not taking.done()
    assert box.put(commit(2))
    box.wake()
    assert [each.base_len for each in await taking] == [2]
