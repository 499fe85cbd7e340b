"""Proposers that dial one process and draft for the engine in another."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import grpc
import pytest

from outrider.rpc.channel import open_channel
from outrider.rpc.server import GrpcServer
from outrider.rpc.telemetry import configure
from outrider.v1 import scorer_pb2_grpc
from scorer_service.call import SERVICE_NAME, Serving
from scorer_service.drafting.side import DraftSide, NoDrafts, RelayedDrafts
from scorer_service.servicer import ScorerServicer, add_to_server
from tests.contract.test_scorer import PROMPT, greedy_text, greedy_truth
from tests.support.services.scorer import running_scorer
from tests.support.services.scripted_proposer import (
    ScriptedProposer,
    follow,
    hello,
    proposing,
)


@asynccontextmanager
async def front(drafts: DraftSide) -> AsyncIterator[scorer_pb2_grpc.ScorerServiceAsyncStub]:
    """A process that serves the Draft RPC only."""
    telemetry = configure("front")
    servicer = ScorerServicer(telemetry)
    nothing = cast("Any", None)
    servicer.begin(Serving(nothing, nothing, nothing, nothing, None, drafts))
    server = GrpcServer("127.0.0.1:0", lambda made: add_to_server(servicer, made), [SERVICE_NAME])
    address = f"127.0.0.1:{await server.start()}"
    try:
        async with open_channel(address) as channel:
            yield scorer_pb2_grpc.ScorerServiceStub(channel)
    finally:
        await server.stop(0)
        telemetry.shutdown()


@pytest.mark.parametrize("data_connections", [True, False], ids=["data connection", "stream"])
async def test_relayed_proposer_drafts_and_leaves_as_if_it_had_dialled_itself(
    socket_folder: Path, data_connections: bool
) -> None:
    path = socket_folder / "drafts"
    async with running_scorer(unix_path=path, data_connections=data_connections) as scorer:
        drafts = RelayedDrafts(f"unix:{path}")
        async with front(drafts) as stub:
            async with proposing(ScriptedProposer(stub, follow(greedy_truth))) as proposer:
                assert (proposer.data is not None) == data_connections
                assert [each.proposer_id for each in await drafts.attached()] == ["proposer-0"]
                output = await scorer.generate(PROMPT)
                await scorer.until(lambda: not proposer.sessions, "Close")
            assert output.token_ids == greedy_text(PROMPT, 40)
            assert output.aux_info.accepted > 0
            await scorer.until(lambda: not scorer.hub.registry.proposers, "detached")


async def test_refusal_behind_the_relay_reaches_the_proposer_with_its_reason(
    socket_folder: Path,
) -> None:
    path = socket_folder / "drafts"
    async with running_scorer(unix_path=path), front(RelayedDrafts(f"unix:{path}")) as stub:
        proposer = ScriptedProposer(stub, follow(greedy_truth), hello(tokenizer_hash="cd" * 32))
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await proposer.dial()
    assert error.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert b"TOKENIZER_MISMATCH" in dict(error.value.trailing_metadata())["grpc-status-details-bin"]


async def test_engine_that_takes_no_proposers_says_so() -> None:
    async with front(NoDrafts()) as stub:
        with pytest.raises(grpc.aio.AioRpcError, match="speculates by itself") as error:
            await ScriptedProposer(stub, follow(greedy_truth)).dial()
    assert error.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert list(await NoDrafts().attached()) == []


async def test_relay_to_nobody_is_unavailable(socket_folder: Path) -> None:
    drafts = RelayedDrafts(f"unix:{socket_folder / 'nobody'}")
    async with front(drafts) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await ScriptedProposer(stub, follow(greedy_truth)).dial()
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE
        assert list(await drafts.attached()) == []
