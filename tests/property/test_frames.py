"""Framing: whatever pieces a connection delivers, messages arrive whole and in order."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.errors import InvalidRequestError, UnavailableError
from outrider.rpc.frames import READ_AHEAD_BYTES, Frames, FrameSocket

MAX_BYTES = 300
MESSAGES = st.lists(st.binary(max_size=MAX_BYTES), max_size=8)
CUTS = st.lists(st.integers(0, 2000), max_size=20)


async def written(messages: Sequence[bytes]) -> bytes:
    """What goes over the connection."""
    ours, theirs = socket.socketpair()
    frames = Frames(*await asyncio.open_connection(sock=ours), MAX_BYTES)
    reader, writer = await asyncio.open_connection(sock=theirs)
    for message in messages:
        await frames.write(message)
    sent = await reader.readexactly(sum(4 + len(message) for message in messages))
    frames.close()
    assert await reader.read() == b""
    writer.close()
    return sent


async def read(chunks: Sequence[bytes], max_bytes: int = MAX_BYTES) -> list[bytes]:
    """All messages until the end, from a connection that delivers these pieces."""
    reader = asyncio.StreamReader(limit=READ_AHEAD_BYTES)
    ours, theirs = socket.socketpair()
    _, writer = await asyncio.open_connection(sock=ours)
    frames = Frames(reader, writer, max_bytes)

    async def deliver() -> None:
        for chunk in chunks:
            reader.feed_data(chunk)
            await asyncio.sleep(0)
        reader.feed_eof()

    delivering = asyncio.create_task(deliver())
    messages = []
    try:
        while (message := await frames.read()) is not None:
            messages.append(message)
        assert await frames.read() is None
    finally:
        await delivering
        frames.close()
        theirs.close()
    return messages


def cut(data: bytes, cuts: Sequence[int]) -> list[bytes]:
    places = [0, *sorted(min(place, len(data)) for place in cuts), len(data)]
    return [data[a:b] for a, b in pairwise(places)]


@given(MESSAGES, CUTS)
def test_frames_in_any_pieces_arrive_whole_and_in_order(
    messages: list[bytes], cuts: list[int]
) -> None:
    async def run() -> None:
        sent = await written(messages)
        # As draft.proto says, in so many bytes.
        assert sent == b"".join(len(m).to_bytes(4, "little") + m for m in messages)
        assert await read(cut(sent, cuts)) == messages

    asyncio.run(run())


@given(MESSAGES, CUTS, st.integers(0, 2500))
def test_frames_of_a_broken_connection_are_whole(
    messages: list[bytes], cuts: list[int], length: int
) -> None:
    async def run() -> None:
        sent = (await written(messages))[:length]
        whole = await read(cut(sent, cuts))
        assert whole == messages[: len(whole)]
        ends = sum(4 + len(message) for message in whole)
        left = messages[len(whole) :]
        assert ends <= len(sent)
        assert not left or len(sent) < ends + 4 + len(left[0]), "the next is not whole"

    asyncio.run(run())


def test_frame_over_the_limit_is_refused_at_once() -> None:
    async def run() -> None:
        long = (5).to_bytes(4, "little")
        with pytest.raises(InvalidRequestError, match="at most 4 are read"):
            await read([(4).to_bytes(4, "little") + b"fits", long], max_bytes=4)

    asyncio.run(run())


def test_frame_socket_with_unread_messages_refuses_more() -> None:
    near, far = socket.socketpair()
    with near, far:
        peer = FrameSocket(far, 2**20, 0)
        frames = FrameSocket(near, 2**20, max_unsent=2**20)
        sent = [bytes([i]) * 2**20 for i in range(8)]
        for _ in range(2):
            frames.send(sent)
            with pytest.raises(UnavailableError, match="does not read"):
                frames.send([b"more"])
            received = []
            while len(received) < len(sent):
                frames.flush()
                received += peer.receive()
            assert received == sent
