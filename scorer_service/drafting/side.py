"""Where a scorer's proposers are attached: in its own process, in its engine's, or nowhere."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Protocol

import grpc

from outrider.errors import ProposerRefusedError, UnavailableError
from outrider.rpc import status
from outrider.rpc.channel import open_channel
from outrider.rpc.data_connection import DataPort
from outrider.rpc.tasks import first_of
from outrider.v1 import scorer_pb2, scorer_pb2_grpc
from scorer_service.drafting.blocks import BlockReceiver
from scorer_service.drafting.stream import serve_proposer
from scorer_service.drafting.transport import Context, Requests

_INFO_TIMEOUT_S = 2.0
_HELLO_TIMEOUT_S = 5.0


class DraftSide(Protocol):
    """The Draft RPC and who is attached. Used on the event loop."""

    async def serve(self, requests: Requests, context: Context) -> None:
        """Run one proposer's stream until either side ends it. Raises what it should end with."""

    async def attached(self) -> Sequence[scorer_pb2.AttachedProposer]:
        """Return the attached proposers."""


class LocalDrafts:
    """Implements `DraftSide` in this process."""

    def __init__(self, blocks: BlockReceiver, data_port: DataPort | None) -> None:
        self._blocks = blocks
        self._data_port = data_port

    async def serve(self, requests: Requests, context: Context) -> None:
        await serve_proposer(requests, context, self._blocks, self._data_port)

    async def attached(self) -> Sequence[scorer_pb2.AttachedProposer]:
        now = asyncio.get_running_loop().time()
        return [
            scorer_pb2.AttachedProposer(
                proposer_id=proposer.id,
                method=proposer.method,
                model=proposer.model,
                sessions=len(proposer.sessions),
                set_aside=proposer.set_aside_until > now,
            )
            for proposer in self._blocks.registry.proposers
        ]


class RelayedDrafts:
    """Implements `DraftSide` by passing streams on to the engine's process, at `target`.

    Drafts and commits do not come through here where proposers use the data connection that the
    other process offers.
    """

    def __init__(self, target: str) -> None:
        self._channel = open_channel(target)
        self._stub = scorer_pb2_grpc.ScorerServiceStub(self._channel)

    async def serve(self, requests: Requests, context: Context) -> None:
        call = self._stub.Draft()

        async def up() -> None:
            async for request in requests:
                await call.write(request)
            await call.done_writing()
            await asyncio.Event().wait()  # the other side ends the stream

        async def down() -> None:
            async for response in call:
                await context.write(response)

        try:
            await first_of(up(), down())
            if (code := await call.code()) is not grpc.StatusCode.OK:
                raise UnavailableError(f"the draft side ended the stream: {code.name}")
        except grpc.aio.AioRpcError as error:
            raise status.from_rpc_error(error) from error
        except asyncio.InvalidStateError as error:  # of a write: the call has ended
            raise UnavailableError("the draft side ended the stream") from error
        finally:
            call.cancel()

    async def attached(self) -> Sequence[scorer_pb2.AttachedProposer]:
        """Return none where the engine's process does not answer."""
        request = scorer_pb2.GetScorerInfoRequest()
        try:
            return (await self._stub.GetScorerInfo(request, timeout=_INFO_TIMEOUT_S)).proposers
        except grpc.aio.AioRpcError:
            return ()


class NoDrafts:
    """Implements `DraftSide` of an engine that speculates by itself, or not at all."""

    async def serve(self, requests: Requests, _context: Context) -> None:
        with contextlib.suppress(TimeoutError):
            # A refusal that overtakes the first message fails its write, and its reason is lost.
            async with asyncio.timeout(_HELLO_TIMEOUT_S):
                await anext(requests, None)
        raise ProposerRefusedError(
            "this scorer takes no proposers: its engine, vLLM, speculates by itself or not at all. "
            "Start it with --num-speculative-tokens above 0 and without a --speculative-config.",
            reason="NO_PROPOSERS",
        )

    async def attached(self) -> Sequence[scorer_pb2.AttachedProposer]:
        return ()
