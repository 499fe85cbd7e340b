"""A step's commits reach the mailboxes of streams."""

from __future__ import annotations

import asyncio

import pytest

from outrider.errors import InternalError
from outrider.types import Commit, FinishReason, TokenKind
from scorer_service.mailbox import Mailbox


def commit(base_len: int, finish_reason: FinishReason | None = None) -> Commit:
    return Commit(1, base_len, (7,), (TokenKind.PLAIN,), 0, finish_reason)


async def test_mailbox_of_stream_that_wants_more_tokens_waits_for_them_or_the_end() -> None:
    box = Mailbox(interval=3)
    box.put(commit(0))
    assert len(await box.take()) == 1, "the first message is sent at once"
    taking = asyncio.create_task(box.take())
    for base_len in (1, 2):
        box.put(commit(base_len))
        await asyncio.sleep(0)
        assert not taking.done()
        assert box.holds_commits
    box.put(commit(3))
    assert [each.base_len for each in await taking] == [1, 2, 3]
    box.put(commit(4, FinishReason.LENGTH))
    assert [each.base_len for each in await box.take()] == [4]


async def test_mailbox_that_was_emptied_waits_for_more() -> None:
    box = Mailbox()
    box.put(commit(0))
    box.put(commit(1))
    assert len(await box.take()) == 2
    taking = asyncio.create_task(box.take())
    await asyncio.sleep(0)
    assert not taking.done()
    box.put(commit(2))
    assert [each.base_len for each in await taking] == [2]


async def test_mailbox_that_fails_has_its_commits_first() -> None:
    box = Mailbox(interval=9)
    box.put(commit(0))
    assert len(await box.take()) == 1
    box.put(commit(1))
    box.fail(InternalError("broken"))
    assert [each.base_len for each in await box.take()] == [1]
    for _ in range(2):
        with pytest.raises(InternalError, match="broken"):
            await box.take()


async def test_mailbox_calls_a_stream_that_does_not_wait() -> None:
    told: list[bool] = []
    box = Mailbox(interval=2)
    box.on_ready = lambda: told.append(box.holds_commits)
    box.put(commit(0))
    assert len(box.take_some(9)) == 1
    box.put(commit(1))
    assert told == [True], "not for the second, which is too little"
    box.put(commit(2))
    assert told == [True, True]
    box.fail(InternalError("broken"))
    assert len(told) == 3
