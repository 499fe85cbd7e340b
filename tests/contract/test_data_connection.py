"""A proposer and a scorer over a data connection: broken, stalled, out of reach, ended."""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks.lib.delay_proxy import DelayProxy
from outrider.rpc import data_connection
from outrider.rpc.deployment import TlsFiles
from outrider.rpc.frames import FrameSocket
from proposer_service import conversation, link
from scorer_service.config import DraftLimits
from tests.support.services.certificates import Issuer
from tests.support.services.guessing import draft_model
from tests.support.services.reader_service import serving
from tests.support.services.scorer import RunningScorer, running_scorer
from tests.support.services.scripted_proposer import ScriptedProposer, hello
from tests.support.waiting import wait_until

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
LENGTH = 140
SLOW_S = 0.01
NO_CONNECTION = "no data connection"


async def attached(scorer: RunningScorer) -> None:
    await scorer.until(lambda: bool(scorer.hub.registry.proposers), "a proposer is attached")


@asynccontextmanager
async def drafting(
    scorer: RunningScorer, address: str, tls: TlsFiles | None = None
) -> AsyncIterator[None]:
    """A proposer service, attached, that dials `address`."""
    async with serving(address, draft_model(), tls):
        await attached(scorer)
        yield


async def is_drafted_for(scorer: RunningScorer) -> None:
    """Sooner or later, on a busy machine; and the text is always what it is without."""
    accepted = 0
    async with asyncio.timeout(10):
        while not accepted:
            output = await scorer.generate(PROMPT)
            assert output.token_ids == scorer.model.greedy_text(PROMPT, 40)
            accepted = output.aux_info.accepted


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level(logging.INFO)
    return lambda: [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


@asynccontextmanager
async def proxied(scorer: RunningScorer) -> AsyncIterator[tuple[DelayProxy, DelayProxy]]:
    """Ways to the stream and to the data connections, each to be broken or stalled alone."""
    async with DelayProxy(scorer.address) as stream, DelayProxy(scorer.data_address) as data:
        yield stream, data


async def stall(proxy: DelayProxy) -> None:
    proxy.delay_s = 0.3
    await asyncio.sleep(0.5)
    proxy.delay_s = 0.0


async def break_during_a_stall(stream: DelayProxy, data: DelayProxy) -> None:
    """The proposer hears of it from the stream alone."""
    data.delay_s = 60.0
    await asyncio.sleep(0.1)  # what is sent now keeps all that follows on that connection
    data.delay_s = 0.0
    await stream.disconnect()


BREAKS: dict[str, Callable[[DelayProxy, DelayProxy], Awaitable[object]]] = {
    "the data connection": lambda _, data: data.disconnect(),
    "the stream": lambda stream, _: stream.disconnect(),
    "the stream, where the data connection is stalled": break_during_a_stall,
    "both": lambda *ways: asyncio.gather(*(way.disconnect() for way in ways)),
}


@pytest.mark.parametrize("what", BREAKS)
async def test_data_connection_when_broken_is_dialled_anew_and_drafted_for(what: str) -> None:
    async with running_scorer(pause_s=SLOW_S) as scorer, proxied(scorer) as ways:
        data = ways[1]
        async with drafting(scorer, ways[0].address):
            [first] = scorer.hub.registry.proposers
            request = asyncio.create_task(scorer.generate(PROMPT, max_tokens=LENGTH))
            await scorer.until(lambda: bool(first.sessions), "it is drafted for")
            [session] = first.sessions.values()
            await scorer.until(lambda: len(session.committed) > 30, "some of it")
            await BREAKS[what](*ways)
            await scorer.until(lambda: session.proposer not in (None, first), "it is opened anew")
            before = data.num_bytes["to"]
            await scorer.until(lambda: data.num_bytes["to"] > before + 100, "and drafted for")
            assert (await request).token_ids == scorer.model.greedy_text(PROMPT, LENGTH)
            await is_drafted_for(scorer)


async def test_data_connection_when_broken_for_the_proposer_is_dialled_anew_at_once(
    monkeypatch: pytest.MonkeyPatch, warnings: Callable[[], list[str]]
) -> None:
    monkeypatch.setattr(conversation, "_STATUS_TIMEOUT_S", 60.0)
    dialled: list[FrameSocket] = []

    def kept(*args: Any) -> FrameSocket:
        dialled.append(data_connection.connect(*args))
        return dialled[-1]

    monkeypatch.setattr(link, "connect", kept)
    async with running_scorer() as scorer, drafting(scorer, scorer.address):
        await is_drafted_for(scorer)
        [first] = scorer.hub.registry.proposers
        [frames] = dialled
        with socket.socket(fileno=os.dup(frames.fileno())) as its:
            its.shutdown(socket.SHUT_RD)  # the scorer is not told
        await scorer.until(lambda: len(dialled) == 2, "it dials anew")
        assert any("the data connection broke" in warning for warning in warnings())
        await scorer.until(lambda: first not in scorer.hub.registry.proposers, "it has left")
        await is_drafted_for(scorer)


def test_data_connection_that_comes_too_late_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    connected: queue.SimpleQueue[FrameSocket] = queue.SimpleQueue()
    ended = threading.Event()

    def late(*args: Any) -> FrameSocket:
        frames = data_connection.connect(*args)
        connected.put(frames)
        ended.wait(1)  # what waits for this thread does not set it
        return frames

    async def end_meanwhile() -> FrameSocket:
        async with running_scorer() as scorer, serving(scorer.address, draft_model()):
            return await asyncio.to_thread(connected.get, timeout=10)

    monkeypatch.setattr(link, "connect", late)
    frames = asyncio.run(end_meanwhile())
    ended.set()
    wait_until(lambda: frames.fileno() < 0, 10, "the late connection to be closed")


async def test_data_connection_when_stalled_costs_drafts_and_no_token() -> None:
    async with (
        running_scorer(pause_s=SLOW_S) as scorer,
        proxied(scorer) as (stream, data),
        drafting(scorer, stream.address),
    ):
        [proposer] = scorer.hub.registry.proposers
        request = asyncio.create_task(scorer.generate(PROMPT, max_tokens=LENGTH))
        await scorer.until(lambda: data.num_bytes["to"] > 100, "it is drafted for")
        await stall(data)
        output = await request
        assert output.token_ids == scorer.model.greedy_text(PROMPT, LENGTH)
        assert output.aux_info.accepted > 0
        assert scorer.hub.registry.proposers == (proposer,), "nobody hung up"


async def test_data_connection_when_open_carries_all_messages() -> None:
    async with (
        running_scorer() as scorer,
        proxied(scorer) as (stream, data),
        drafting(scorer, stream.address),
    ):
        await is_drafted_for(scorer)
        before = sum(stream.num_bytes.values()), sum(data.num_bytes.values())
        for _ in range(5):
            await is_drafted_for(scorer)
        grown = (
            sum(stream.num_bytes.values()) - before[0],
            sum(data.num_bytes.values()) - before[1],
        )
        assert grown[1] > 1000
        assert grown[0] < 500, "pings, if anything"


async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()
    writer.close()


async def another_service(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"220 mail.example ESMTP\r\n")
    await silent(reader, writer)


async def hangs_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.close()


@pytest.mark.parametrize("answers", [None, silent, another_service, hangs_up])
async def test_data_connection_to_a_foreign_port_falls_back_to_the_stream(
    answers: Callable[..., Awaitable[None]] | None, warnings: Callable[[], list[str]]
) -> None:
    async with running_scorer() as scorer, DelayProxy(scorer.address) as stream:
        # The proxy stands at an address of its own, and what else is there is not the scorer's.
        host = stream.address.rpartition(":")[0]
        port = int(scorer.data_address.rpartition(":")[2])
        server = None if answers is None else await asyncio.start_server(answers, host, port)
        async with drafting(scorer, stream.address), asyncio.timeout(8):
            await scorer.until(lambda: any(NO_CONNECTION in w for w in warnings()), "it says so")
            await is_drafted_for(scorer)
        if server is not None:
            server.close()
            await server.wait_closed()


async def test_data_connection_to_a_slow_port_falls_back_to_the_stream(
    monkeypatch: pytest.MonkeyPatch, warnings: Callable[[], list[str]]
) -> None:
    monkeypatch.setattr(link, "_CONNECT_TIMEOUT_S", 0.1)
    connected: queue.SimpleQueue[FrameSocket] = queue.SimpleQueue()
    go_on = threading.Event()

    def late(*args: Any) -> FrameSocket:  # as for a name of which no address but the last answers
        go_on.wait(20)
        frames = data_connection.connect(*args)
        connected.put(frames)
        return frames

    monkeypatch.setattr(link, "connect", late)
    async with (
        running_scorer(limits=DraftLimits(hello_timeout_s=1.0)) as scorer,
        drafting(scorer, scorer.address),
    ):
        await is_drafted_for(scorer)
        assert any(NO_CONNECTION in warning for warning in warnings())
        go_on.set()
        frames = await asyncio.to_thread(connected.get, timeout=10)
        await scorer.until(lambda: frames.fileno() < 0, "what comes in the end is closed")


async def test_data_connection_without_a_port_falls_back_to_the_stream(
    warnings: Callable[[], list[str]],
) -> None:
    async with (
        running_scorer(data_connections=False) as scorer,
        drafting(scorer, scorer.address),
    ):
        await is_drafted_for(scorer)
    assert not any(NO_CONNECTION in warning for warning in warnings())


async def test_data_connection_over_a_unix_socket_carries_drafts(
    socket_folder: Path, warnings: Callable[[], list[str]]
) -> None:
    path = socket_folder / "scorer.sock"
    async with running_scorer(unix_path=path) as scorer:
        async with drafting(scorer, f"unix:{path}"):
            await is_drafted_for(scorer)
            assert not any(NO_CONNECTION in warning for warning in warnings())
            # Without the second socket there is only the stream.
            (socket_folder / "scorer.sock.data").rename(socket_folder / "elsewhere")
            scorer.hub.registry.detach(scorer.hub.registry.proposers[0])
            await scorer.until(lambda: any(NO_CONNECTION in w for w in warnings()), "it says so")
            await attached(scorer)
            await is_drafted_for(scorer)
        (socket_folder / "elsewhere").unlink()
    assert os.listdir(socket_folder) == []


async def test_data_connection_with_mutual_tls_carries_drafts(
    tmp_path: Path, warnings: Callable[[], list[str]]
) -> None:
    issuer = Issuer()
    server = issuer.write(tmp_path / "server", "127.0.0.1", "127.0.0.2")
    client = issuer.write(tmp_path / "client", "127.0.0.1")
    async with (
        running_scorer(tls=server) as scorer,
        proxied(scorer) as (stream, data),
        drafting(scorer, stream.address, client),
    ):
        await is_drafted_for(scorer)
        assert data.num_bytes["to"] > 1000
        # Replaced under way: what is open goes on, and the next connection has the new ones.
        renewed = Issuer()
        renewed.write(tmp_path / "server", "127.0.0.1", "127.0.0.2")
        renewed.write(tmp_path / "client", "127.0.0.1")
        before = data.num_bytes["to"]
        await is_drafted_for(scorer)
        assert data.num_bytes["to"] > before
        [first] = scorer.hub.registry.proposers
        await stream.disconnect()
        await scorer.until(
            lambda: scorer.hub.registry.proposers not in ((), (first,)), "it dialled anew"
        )
        before = data.num_bytes["to"]
        await is_drafted_for(scorer)
        assert data.num_bytes["to"] > before
        assert not any(NO_CONNECTION in warning for warning in warnings())


async def replaced(scorer: RunningScorer) -> None:
    anew = ScriptedProposer(
        scorer.stub, lambda _: [], hello(proposer_id="reader", incarnation=2**62)
    )
    await anew.dial()
    anew.call.cancel()


ENDED: dict[str, tuple[Callable[[RunningScorer], Awaitable[object]], str]] = {
    "drained": (lambda scorer: scorer.servicer.drain(10), "shutting down"),
    "replaced": (replaced, "dialled anew"),
}


@pytest.mark.parametrize("how", ENDED)
async def test_data_connection_when_ended_by_the_scorer_logs_why(
    how: str, warnings: Callable[[], list[str]]
) -> None:
    end, message = ENDED[how]
    async with (
        running_scorer() as scorer,
        drafting(scorer, scorer.address),
    ):
        await is_drafted_for(scorer)
        await end(scorer)
        await scorer.until(lambda: any(message in w for w in warnings()), "it is told")


async def test_data_connection_when_proposer_stops_says_goodbye(
    warnings: Callable[[], list[str]],
) -> None:
    async with running_scorer(pause_s=SLOW_S) as scorer:
        async with drafting(scorer, scorer.address):
            request = asyncio.create_task(scorer.generate(PROMPT, max_tokens=LENGTH))
            [proposer] = scorer.hub.registry.proposers
            await scorer.until(lambda: bool(proposer.sessions), "it is drafted for")
        await scorer.until(lambda: not scorer.hub.registry.proposers, "it is gone")
        assert (await request).token_ids == scorer.model.greedy_text(PROMPT, LENGTH)
    assert not warnings()
