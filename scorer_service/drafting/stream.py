"""The Draft RPC: the conversation of draft.proto with one proposer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from outrider.errors import DeadlineError, InvalidRequestError, OutriderError
from outrider.rpc.data_connection import DataPort, Offer
from outrider.rpc.tasks import first_of
from outrider.rpc.versions import agreed_version
from outrider.v1 import draft_pb2
from scorer_service.config import DraftLimits, ServedModel
from scorer_service.drafting.attached import AttachedProposer
from scorer_service.drafting.outbox import Outbox
from scorer_service.drafting.transport import Context, Transport, through_frames, through_stream
from scorer_service.hub import Hub


async def serve_proposer(
    requests: AsyncIterator[draft_pb2.DraftRequest],
    context: Context,
    hub: Hub,
    served: ServedModel,
    limits: DraftLimits,
    *,
    data_port: DataPort | None,
) -> None:
    """Run one stream until either side ends it. Raises the error that it should end with."""
    hello = await _read_hello(requests, limits.hello_timeout_s)
    proposer = hub.roster.attach(hello)
    with contextlib.ExitStack() as cleanup:
        cleanup.callback(hub.roster.detach, proposer)
        welcome = _welcome(hello, served, limits)
        welcome.wants_projection = not proposer.ready
        offer = None
        if data_port is not None and hello.data_connection:
            offer = cleanup.enter_context(data_port.offer())
            welcome.data_connection.CopyFrom(offer.message)
        await context.write(draft_pb2.DraftResponse(welcome=welcome))
        conversing = asyncio.create_task(
            _converse(proposer, requests, context, hub, limits, offer)
        )
        try:
            tasks = (conversing, proposer.detached)
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            conversing.cancel()
            [result] = await asyncio.gather(conversing, return_exceptions=True)
        if proposer.detached.done():
            error = proposer.detached.result()
            if error is not None:
                raise error
        # A write to, or a read from, a stream that is gone fails in ways that gRPC chooses.
        if isinstance(result, OutriderError):
            raise result


async def _converse(
    proposer: AttachedProposer,
    requests: AsyncIterator[draft_pb2.DraftRequest],
    context: Context,
    hub: Hub,
    limits: DraftLimits,
    offer: Offer | None,
) -> None:
    """From Welcome until the proposer closes its side or goes away."""
    wire = through_stream(requests, context)
    if offer is not None and await _is_connected(requests, limits.hello_timeout_s):
        wire = through_frames(requests, offer)
    if not proposer.ready:
        await hub.roster.complete(proposer, requests)
    await first_of(_read(proposer, wire, hub), _write(proposer, wire, hub))


async def _read(proposer: AttachedProposer, wire: Transport, hub: Hub) -> None:
    """Until the proposer closes its side or goes away: grpc.aio cannot tell the two apart."""
    async with contextlib.aclosing(wire.requests()) as requests:
        async for request in requests:
            match request.WhichOneof("message"):
                case "blocks":
                    hub.on_blocks(proposer, request.blocks.blocks)
                case "lost":
                    hub.roster.on_lost(proposer, request.lost)
                case "goodbye":
                    hub.roster.on_goodbye(proposer)
                case other:
                    hub.on_bad(proposer, f"{other or 'an empty message'} after Hello")


async def _write(proposer: AttachedProposer, wire: Transport, hub: Hub) -> None:
    outbox = proposer.outbox
    assert isinstance(outbox, Outbox), "it came by this stream"
    while True:
        message = await outbox.take()
        hub.on_taken(outbox)
        await wire.write(message)


async def _read_hello(
    requests: AsyncIterator[draft_pb2.DraftRequest], timeout_s: float
) -> draft_pb2.Hello:
    request = await _next(requests, "Hello", timeout_s)
    if request is None or request.WhichOneof("message") != "hello":
        raise InvalidRequestError("the first message of a Draft stream is Hello", param="hello")
    return request.hello


async def _is_connected(requests: AsyncIterator[draft_pb2.DraftRequest], timeout_s: float) -> bool:
    """Whether the proposer has taken up the data connection of Welcome."""
    request = await _next(requests, "DataConnected", timeout_s)
    if request is None or request.WhichOneof("message") != "data_connected":
        raise InvalidRequestError(
            "DataConnected answers a Welcome that offers a data connection", param="data_connected"
        )
    return request.data_connected.used


async def _next(
    requests: AsyncIterator[draft_pb2.DraftRequest], what: str, timeout_s: float
) -> draft_pb2.DraftRequest | None:
    """None if the proposer has closed its side. Raises `DeadlineError`."""
    try:
        async with asyncio.timeout(timeout_s):
            return await anext(requests, None)
    except TimeoutError:
        raise DeadlineError(f"no {what} within {timeout_s:g} s") from None


def _welcome(hello: draft_pb2.Hello, served: ServedModel, limits: DraftLimits) -> draft_pb2.Welcome:
    return draft_pb2.Welcome(
        protocol_version=agreed_version(hello.protocol_version),
        scorer_id=served.scorer_id,
        vocab_size=served.vocab_size,
        max_block_tokens=limits.max_block_tokens,
    )
