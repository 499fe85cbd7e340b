"""The draft side that vLLM's worker hosts, dialled by proposers over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.errors import ConfigError
from outrider.features import FeatureSpec
from outrider.rpc.channel import open_channel
from outrider.rpc.deployment import TlsFiles
from outrider.v1 import draft_pb2, scorer_pb2, scorer_pb2_grpc
from outrider.vllm.draft_server import DraftServer, ServerOptions
from outrider.vllm.proposer import NO_FEATURES
from tests.support.services.certificates import Issuer, flags
from tests.support.services.scripted_proposer import (
    Drafted,
    ScriptedProposer,
    block,
    hello,
    proposing,
)
from tests.support.services.vllm_steps import SERVED, VOCAB, VllmSteps, truth
from tests.support.waiting import until


class Hosted:
    """A server, and steps of the engine that it drafts for."""

    def __init__(self, world: VllmSteps, server: DraftServer, address: str) -> None:
        self.world, self.server, self.address = world, server, address


@asynccontextmanager
async def hosted(
    monkeypatch: pytest.MonkeyPatch, line: str = "", features: FeatureSpec | None = None
) -> AsyncIterator[Hosted]:
    world = VllmSteps(monkeypatch, ("a",), max_wait_s=5.0)
    server = DraftServer(world.host, ServerOptions.parse(f"--port 0 --data-port 0 {line}"))
    served = replace(SERVED, no_features=NO_FEATURES, features=features)
    addresses = await asyncio.to_thread(server.start, served)
    try:
        yield Hosted(world, server, addresses["grpc"])
    finally:
        await asyncio.to_thread(server.stop)


@asynccontextmanager
async def dialled(
    address: str, tls: TlsFiles | None = None, **fields: object
) -> AsyncIterator[ScriptedProposer]:
    def script(session: Drafted) -> list[draft_pb2.Block]:
        return [block(session, [truth("a", len(session.tokens) + i) for i in range(4)])]

    greeting = hello(vocab_size=VOCAB, tokenizer_hash="", **fields)
    async with open_channel(address, tls) as channel:
        stub = scorer_pb2_grpc.ScorerServiceStub(channel)
        yield ScriptedProposer(stub, script, greeting)


async def test_hosted_server_refuses_a_head_of_a_target_of_another_width(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    captured = FeatureSpec(16, (), True)
    features = draft_pb2.FeatureSpec(hidden_size=8, final_norm=True)
    fields = {"method": "eagle", "methods": ["eagle"], "features": features}
    up = hosted(monkeypatch, features=captured)
    async with up as there, dialled(there.address, **fields) as proposer:
        with pytest.raises(grpc.aio.AioRpcError, match="have 8 values, this one's have 16"):
            await proposer.say_hello()


@pytest.mark.parametrize("secured", [False, True], ids=["plain", "mutual TLS"])
async def test_hosted_drafts_come_from_a_proposer_that_dials_in(
    secured: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    issuer = Issuer()
    files = issuer.write(tmp_path / "server", "127.0.0.1")
    mine = issuer.write(tmp_path / "client", "127.0.0.1") if secured else None
    line = " ".join(flags(files)) if secured else ""
    fields = {"data_connection": not secured}  # the script speaks no TLS there
    async with hosted(monkeypatch, line) as up, dialled(up.address, mine, **fields) as proposer:
        async with proposing(proposer):
            assert (proposer.data is None) == secured
            await asyncio.to_thread(up.world.step)  # begins the request; no row waits for strangers
            await until(lambda: bool(proposer.opens))
            for _ in range(3):
                drafts = await asyncio.to_thread(up.world.step)
            text = up.world.texts["a"]
            assert drafts["a"], "a draft that was waited for"
            assert text == [truth("a", i) for i in range(len(text))]
            assert len(text) > 3 + 4 + 4, "some were accepted"
            (session,) = up.server._hub._sessions.values()
            assert not session.mailbox.holds_commits, "nobody takes them"
        if secured:
            async with dialled(up.address) as stranger:
                with pytest.raises(grpc.aio.AioRpcError):
                    await stranger.say_hello()


async def test_hosted_server_says_what_it_serves_and_refuses_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with hosted(monkeypatch) as up, open_channel(up.address) as channel:
        stub = scorer_pb2_grpc.ScorerServiceStub(channel)
        info = await stub.GetScorerInfo(scorer_pb2.GetScorerInfoRequest())
        assert (info.served_model_name, info.vocab_size) == ("m", VOCAB)
        health = health_pb2_grpc.HealthStub(channel)
        answer = await health.Check(health_pb2.HealthCheckRequest())
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.aio.AioRpcError, match="vLLM's own server"):
            await stub.Generate(scorer_pb2.ScorerServiceGenerateRequest()).read()
        port = up.address.rpartition(":")[2]
        second = DraftServer(up.world.host, ServerOptions.parse(f"--port {port} --data-port 0"))
        with pytest.raises(ConfigError, match="taken"):
            await asyncio.to_thread(second.start, SERVED)


async def test_hosted_server_refuses_hidden_state_methods_and_names_vllms(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    features = draft_pb2.FeatureSpec(hidden_size=8, final_norm=True)
    fields = {"method": "eagle", "methods": ["eagle"], "features": features}
    async with hosted(monkeypatch) as up, dialled(up.address, **fields) as proposer:
        with pytest.raises(
            grpc.aio.AioRpcError,
            match=r"captures none: start it with --hidden-features final .*vLLM's own method",
        ):
            await proposer.say_hello()
