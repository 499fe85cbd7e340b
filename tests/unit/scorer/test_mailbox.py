"""A step's commits reach the mailboxes of streams."""

from __future__ import annotations

from outrider.types import Commit, FinishReason, TokenKind
from scorer_service.mailbox import Deliveries, Mailbox

MANY = 40  # more than are delivered at once


def commit(base_len: int, finish_reason: FinishReason | None = None) -> Commit:
    return Commit(1, base_len, (7,), (TokenKind.PLAIN,), 0, finish_reason)


async def test_deliveries_to_streams_that_want_more_tokens_take_no_turn() -> None:
    boxes = [Mailbox(interval=3) for _ in range(MANY)]
    deliveries = Deliveries()
    for box in boxes:
        box.put(commit(0))  # the first message is sent at once
        assert len(await box.take()) == 1
    for box in boxes:
        deliveries.put(box, commit(1))
    assert all(box.holds_commits for box in boxes)
    deliveries.finish()
    for box in boxes:
        deliveries.put(box, commit(2, FinishReason.LENGTH))
    assert sum(len(box._commits) for box in boxes) == MANY, "ends wake streams, in their turn"
    deliveries.finish()
    assert [len(await box.take()) for box in boxes] == [2] * MANY
