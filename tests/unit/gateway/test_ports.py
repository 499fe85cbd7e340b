"""The ports of a gateway."""

from __future__ import annotations

import asyncio
import socket

from gateway.ports import bind


async def test_connection_to_a_bound_port_waits_for_no_acknowledgement() -> None:
    """With Nagle's algorithm, a head and a body that are written apart lie 40 ms apart."""
    delays: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def connected(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted = writer.get_extra_info("socket")
        delays.set_result(accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    bound = bind("127.0.0.1", 0)
    async with await asyncio.start_server(connected, sock=bound):
        _, writer = await asyncio.open_connection(*bound.getsockname())
        assert await asyncio.wait_for(delays, 10)
        writer.close()
