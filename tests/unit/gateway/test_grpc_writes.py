"""Messages of a gRPC call: in order, one under way at most, all of a turn begun together."""

from __future__ import annotations

import asyncio

import pytest

from gateway.grpc_writes import Writes
from outrider.end_of_turn import EndOfTurn


class Call:
    """A call whose writes end when the test says so."""

    def __init__(self) -> None:
        self.begun: list[bytes] = []
        self.ended: list[bytes] = []
        self.pending: list[asyncio.Future[None]] = []

    async def write(self, message: bytes) -> None:
        self.begun.append(message)
        self.pending.append(asyncio.get_running_loop().create_future())
        await self.pending[-1]
        self.ended.append(message)

    async def writing(self, number: int) -> asyncio.Future[None]:
        """Return the future of a write, once it has begun."""
        async with asyncio.timeout(5):
            while len(self.pending) <= number:  # noqa: ASYNC110
                await asyncio.sleep(0)
        return self.pending[number]


async def begun(call: Call, burst: EndOfTurn[Writes]) -> Writes:
    """Return writes whose first message is written."""
    writes = Writes(call.write, burst)
    first = asyncio.create_task(writes.add(b"0"))
    (await call.writing(0)).set_result(None)
    await first
    assert call.ended == [b"0"]
    return writes


async def test_add_waits_for_the_first_message_and_then_for_the_one_before() -> None:
    call = Call()
    writes = await begun(call, EndOfTurn(Writes.begin))
    await writes.add(b"1")
    second = await call.writing(1)
    add = asyncio.create_task(writes.add(b"2"))
    await asyncio.sleep(0.01)
    assert call.begun == [b"0", b"1"]
    assert not add.done()
    second.set_result(None)
    await add
    third = await call.writing(2)
    async with asyncio.timeout(5), writes:
        asyncio.get_running_loop().call_soon(third.set_result, None)
    assert call.ended == [b"0", b"1", b"2"]


async def test_message_is_added_at_once_only_where_the_one_before_is_written() -> None:
    call = Call()
    burst = EndOfTurn(Writes.begin)
    assert not Writes(call.write, burst).ready, "the first message is waited for"
    writes = await begun(call, burst)
    for number in (1, 2):
        assert writes.ready
        writes.add_now(b"%d" % number)
        assert not writes.ready, "it is due"
        pending = await call.writing(number)
        assert not writes.ready, "it is under way"
        pending.set_result(None)
    assert writes.ready
    assert call.ended == [b"0", b"1", b"2"]
    writes.add_now(b"3")
    (await call.writing(3)).set_exception(ConnectionError("gone"))
    assert not writes.ready
    with pytest.raises(ConnectionError, match="gone"):
        await writes.add(b"4")


async def test_messages_of_a_turn_begin_together_after_it() -> None:
    burst, calls = EndOfTurn(Writes.begin), [Call(), Call()]
    writes = [await begun(call, burst) for call in calls]
    seen: list[list[list[bytes]]] = []

    async def add(each: Writes) -> None:
        await each.add(b"1")
        seen.append([call.begun[:] for call in calls])

    await asyncio.gather(*map(add, writes))
    assert seen == 2 * [2 * [[b"0"]]]
    await asyncio.sleep(0)
    assert [call.begun for call in calls] == 2 * [[b"0", b"1"]]


async def test_error_of_a_write_is_raised_by_the_next_one_and_stops_no_other_call() -> None:
    burst, call, other = EndOfTurn(Writes.begin), Call(), Call()
    writes, others = await begun(call, burst), await begun(other, burst)

    async def gone(_message: bytes) -> None:
        raise ConnectionError("gone")

    writes._write = gone
    await writes.add(b"1")
    await others.add(b"1")
    await other.writing(1)
    with pytest.raises(ConnectionError, match="gone"):
        await writes.add(b"2")


async def test_end_with_an_error_sends_what_was_added_and_does_not_wait() -> None:
    call = Call()
    writes = await begun(call, EndOfTurn(Writes.begin))

    async def fail() -> None:
        async with asyncio.timeout(5), writes:
            await writes.add(b"1")
            raise ValueError("bad")

    with pytest.raises(ValueError, match="bad"):
        await fail()
    assert call.begun == [b"0", b"1"]
    call.pending[1].set_exception(ConnectionError("nobody asks"))
