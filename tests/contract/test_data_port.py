"""The scorer's data port: who is let in, who is hung up on, and that nobody else notices."""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, closing
from pathlib import Path

import grpc
import pytest

from outrider.rpc import data_connection
from outrider.rpc.channel import open_channel
from outrider.rpc.deployment import TlsFiles
from outrider.rpc.tls import server_context
from outrider.v1 import draft_pb2, scorer_pb2_grpc
from scorer_service.config import DraftLimits
from tests.support.services.certificates import Issuer
from tests.support.services.data_wire import DataWire
from tests.support.services.guessing import guessing
from tests.support.services.scorer import RunningScorer, running_scorer
from tests.support.services.scripted_proposer import ScriptedProposer, hello, proposing

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
MAX_STRANGERS = 64


@asynccontextmanager
async def serves(scorer: RunningScorer) -> AsyncIterator[ScriptedProposer]:
    """A proposer is attached whose drafts come through its data connection all along."""
    plain = await scorer.generate(PROMPT, enabled=False)
    async with proposing(guessing(scorer)) as proposer:
        yield proposer
        output = await scorer.generate(PROMPT)
        assert not proposer.ended.is_set()
    assert output.token_ids == plain.token_ids
    assert output.aux_info.accepted > 0


def port_of(scorer: RunningScorer) -> int:
    return int(scorer.data_address.rpartition(":")[2])


async def ending(call: grpc.aio.StreamStreamCall) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    return caught.value.code()


INTRUDERS: dict[str, Callable[[bytes], bytes]] = {
    "a wrong key": lambda _: bytes(32),
    "a key that was used": lambda used: used,
    "half a key": lambda used: used[:16],
    "nothing": lambda _: b"",
    "another protocol": lambda _: b"GET / HTTP/1.1\r\nHost: scorer\r\nAccept: */*\r\n\r\n",
}


@pytest.mark.parametrize("what", INTRUDERS)
async def test_data_port_without_a_good_key_hangs_up(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_connection, "_KEY_TIMEOUT_S", 0.1)
    async with running_scorer() as scorer, serves(scorer) as proposer:
        assert proposer.welcome is not None
        intruder = await DataWire.dial(port_of(scorer))
        assert not await intruder.show(INTRUDERS[what](proposer.welcome.data_connection.key))
        intruder.close()


async def test_data_port_with_half_a_key_forgets_the_stranger() -> None:
    async with running_scorer() as scorer, serves(scorer):
        for _ in range(MAX_STRANGERS + 1):
            stranger = await DataWire.dial(port_of(scorer))
            await stranger.send_bytes(bytes(16))
            stranger.close_writing()
            await stranger.until_closed()
            stranger.close()
        async with proposing(guessing(scorer, "another")) as another:
            assert another.data is not None


async def test_data_port_with_key_of_an_ended_conversation_refuses_it() -> None:
    async with running_scorer() as scorer, serves(scorer):
        left = guessing(scorer, "another")
        welcome = await left.say_hello()
        left.call.cancel()
        await scorer.until(lambda: len(scorer.hub.registry.proposers) == 1, "it is gone")
        late = await DataWire.dial(port_of(scorer))
        assert not await late.show(welcome.data_connection.key)
        late.close()


async def test_data_port_with_many_strangers_lets_others_connect(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(data_connection, "_KEY_TIMEOUT_S", 60.0)
    async with running_scorer() as scorer, AsyncExitStack() as cleanup:
        strangers = []
        for _ in range(MAX_STRANGERS):
            strangers.append(await DataWire.dial(port_of(scorer)))
            cleanup.callback(strangers[-1].close)
        async with serves(scorer) as proposer:
            assert proposer.data is not None
            await strangers[0].until_closed()  # who came first has made room


async def test_data_port_when_proposer_cannot_connect_goes_on_through_the_stream() -> None:
    async with running_scorer() as scorer:
        plain = await scorer.generate(PROMPT, enabled=False)
        proposer = guessing(scorer)
        await proposer.say_hello()
        await proposer.send(data_connected=draft_pb2.DataConnected(used=False))
        running = asyncio.create_task(proposer.run())
        output = await scorer.generate(PROMPT)
        proposer.call.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert output.token_ids == plain.token_ids
    assert output.aux_info.accepted > 0


async def test_data_port_when_proposer_does_not_ask_is_not_offered() -> None:
    async with running_scorer() as scorer:
        proposer = ScriptedProposer(scorer.stub, lambda _: [], hello(data_connection=False))
        assert not (await proposer.say_hello()).HasField("data_connection")
        proposer.call.cancel()


NOT_CONNECTED = {
    "used, and is not": draft_pb2.DraftRequest(data_connected=draft_pb2.DataConnected(used=True)),
    "something else": draft_pb2.DraftRequest(blocks=draft_pb2.BlockBatch()),
}


@pytest.mark.parametrize("what", NOT_CONNECTED)
async def test_data_port_with_another_message_than_data_connected_ends_the_stream(
    what: str,
) -> None:
    async with running_scorer() as scorer, serves(scorer):
        proposer = guessing(scorer, "another")
        await proposer.say_hello()
        await proposer.call.write(NOT_CONNECTED[what])
        assert await ending(proposer.call) is grpc.StatusCode.INVALID_ARGUMENT


async def test_data_port_without_data_connected_in_time_ends_the_stream() -> None:
    async with running_scorer(limits=DraftLimits(hello_timeout_s=0.5)) as scorer, serves(scorer):
        proposer = guessing(scorer, "another")
        await proposer.say_hello()
        assert await ending(proposer.call) is grpc.StatusCode.DEADLINE_EXCEEDED


def trusting(files: TlsFiles, *, certificate: TlsFiles | None) -> ssl.SSLContext:
    """What a client of `files`' authority has, with a certificate to show or without."""
    context = ssl.create_default_context(cafile=files.ca)
    if certificate is not None:
        context.load_cert_chain(certificate.cert, certificate.key)
    return context


async def test_data_port_with_tls_reads_keys_only_of_peers_of_its_authority(
    tmp_path: Path,
) -> None:
    issuer = Issuer()
    server, client = (issuer.write(tmp_path / name, "127.0.0.1") for name in ("server", "client"))
    stranger = Issuer().write(tmp_path / "stranger", "127.0.0.1")
    async with running_scorer(tls=server) as scorer, open_channel(scorer.address, client) as way:
        proposer = ScriptedProposer(scorer_pb2_grpc.ScorerServiceStub(way), lambda _: [])
        key = (await proposer.say_hello()).data_connection.key

        async def let_in(context: ssl.SSLContext | None) -> bool:
            wire = await DataWire.dial(port_of(scorer), context)
            try:
                return await wire.show(key)
            finally:
                wire.close()

        assert not await let_in(None), "no TLS"
        assert not await let_in(trusting(client, certificate=None)), "no certificate"
        assert not await let_in(trusting(client, certificate=stranger)), "of another authority"
        with pytest.raises(ssl.SSLCertVerificationError):
            await let_in(trusting(stranger, certificate=client))
        assert await let_in(trusting(client, certificate=client)), "the key was not used up"
        proposer.call.cancel()


def two_authorities(folder: Path) -> tuple[Issuer, TlsFiles, TlsFiles, TlsFiles]:
    """The new one; the files of a server and of a client by the old one, of a client by the new."""
    old, new = Issuer(), Issuer()
    server, former = (old.write(folder / name, "127.0.0.1") for name in ("server", "former"))
    return new, server, former, new.write(folder / "renewed", "127.0.0.1")


async def test_data_port_with_replaced_certificates_uses_them_for_the_next_connection(
    tmp_path: Path,
) -> None:
    new, server, former, renewed = two_authorities(tmp_path)
    async with running_scorer(tls=server) as scorer:
        for client in (former, renewed):
            async with open_channel(scorer.address, client) as way:
                stub = scorer_pb2_grpc.ScorerServiceStub(way)
                proposer = ScriptedProposer(stub, lambda _: [])
                key = (await proposer.say_hello()).data_connection.key
                context = trusting(client, certificate=client)
                wire = await DataWire.dial(port_of(scorer), context)
                assert await wire.show(key)
                wire.close()
                proposer.call.cancel()
            new.write(tmp_path / "server", "127.0.0.1")


async def test_data_port_with_replaced_authority_refuses_the_former(tmp_path: Path) -> None:
    new, server, former, renewed = two_authorities(tmp_path)
    async with running_scorer(tls=server) as scorer:
        new.write(tmp_path / "server", "127.0.0.1")
        async with open_channel(scorer.address, renewed) as way:
            proposer = ScriptedProposer(scorer_pb2_grpc.ScorerServiceStub(way), lambda _: [])
            key = (await proposer.say_hello()).data_connection.key
            context = trusting(renewed, certificate=former)
            with closing(await DataWire.dial(port_of(scorer), context)) as wire:
                assert not await wire.show(key)
            proposer.call.cancel()


async def test_data_port_with_changed_certificates_reads_them_once_they_are_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[TlsFiles] = []

    def counted(files: TlsFiles) -> ssl.SSLContext:
        read.append(files)
        return server_context(files)

    monkeypatch.setattr(data_connection, "server_context", counted)
    new, server, former, renewed = two_authorities(tmp_path)
    port = data_connection.DataPort("127.0.0.1", 0, tls=server)

    async def lets_in(client: TlsFiles) -> bool:
        with port.offer() as offer:
            context = trusting(client, certificate=client)
            with closing(await DataWire.dial(offer.message.port, context)) as wire:
                return await wire.show(offer.message.key)

    await port.start()
    try:
        for _ in range(3):
            assert await lets_in(former)
        assert len(read) == 1, "at the start"
        await asyncio.to_thread(os.truncate, server.cert, 200)
        assert await lets_in(former), "half written"
        new.write(tmp_path / "server", "127.0.0.1")
        read.clear()
        for _ in range(3):
            assert await lets_in(renewed)
        assert len(read) == 1
    finally:
        await port.stop()


async def test_data_port_without_a_handshake_hangs_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_connection, "_KEY_TIMEOUT_S", 0.1)
    files = Issuer().write(tmp_path, "127.0.0.1")
    async with running_scorer(tls=files) as scorer:
        with closing(await DataWire.dial(port_of(scorer))) as stranger:
            async with asyncio.timeout(30):
                await stranger.until_closed()
