"""The Draft RPC: the conversation of draft.proto with one proposer."""

from __future__ import annotations

import asyncio
import contextlib

from outrider.errors import DeadlineError, InvalidRequestError, OutriderError
from outrider.rpc.data_connection import DataPort, Offer
from outrider.rpc.tasks import first_of
from outrider.rpc.versions import agreed_version
from outrider.v1 import draft_pb2
from scorer_service.drafting.attached import AttachedProposer
from scorer_service.drafting.blocks import BlockReceiver
from scorer_service.drafting.outbox import Outbox
from scorer_service.drafting.registry import ProposerRegistry
from scorer_service.drafting.transport import (
    Context,
    Requests,
    Transport,
    through_frames,
    through_stream,
)


async def serve_proposer(
    requests: Requests, context: Context, blocks: BlockReceiver, data_port: DataPort | None
) -> None:
    """Run one stream until either side ends it. Raises the error that it should end with."""
    registry = blocks.registry
    hello = await _read_hello(requests, registry.limits.hello_timeout_s)
    proposer = registry.attach(hello)
    with contextlib.ExitStack() as cleanup:
        cleanup.callback(registry.detach, proposer)
        welcome = draft_pb2.Welcome(
            protocol_version=agreed_version(hello.protocol_version),
            scorer_id=registry.served.scorer_id,
            vocab_size=registry.served.vocab_size,
            max_block_tokens=registry.limits.max_block_tokens,
            wants_projection=not proposer.ready,
        )
        offer = None
        if data_port is not None and hello.data_connection:
            offer = cleanup.enter_context(data_port.offer())
            welcome.data_connection.CopyFrom(offer.message)
        await context.write(draft_pb2.DraftResponse(welcome=welcome))
        conversing = asyncio.create_task(_converse(proposer, requests, context, blocks, offer))
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
        # Other errors are gRPC's, of reads and writes on a stream that is gone.
        if isinstance(result, OutriderError):
            raise result


async def _converse(
    proposer: AttachedProposer,
    requests: Requests,
    context: Context,
    blocks: BlockReceiver,
    offer: Offer | None,
) -> None:
    """Talk to the proposer after Welcome, until it closes its side or goes away."""
    registry = blocks.registry
    transport = through_stream(requests, context)
    if offer is not None and await _is_connected(requests, registry.limits.hello_timeout_s):
        transport = through_frames(requests, offer)
    if not proposer.ready:
        await registry.complete(proposer, requests)
    await first_of(_read(proposer, transport, blocks), _write(proposer, transport, registry))


async def _read(proposer: AttachedProposer, transport: Transport, blocks: BlockReceiver) -> None:
    """Read until the proposer closes its side or goes away; grpc.aio cannot tell these apart."""
    async with contextlib.aclosing(transport.requests()) as requests:
        async for request in requests:
            match request.WhichOneof("message"):
                case "blocks":
                    blocks.receive(proposer, request.blocks.blocks)
                case "lost":
                    blocks.registry.on_lost(proposer, request.lost)
                case "goodbye":
                    blocks.registry.on_goodbye(proposer)
                case other:
                    blocks.on_bad(proposer, f"{other or 'an empty message'} after Hello")


async def _write(
    proposer: AttachedProposer, transport: Transport, registry: ProposerRegistry
) -> None:
    outbox = proposer.outbox
    assert isinstance(outbox, Outbox), "the proposer came by this stream"
    while True:
        message = await outbox.take()
        registry.on_taken(outbox)
        await transport.write(message)


async def _read_hello(requests: Requests, timeout_s: float) -> draft_pb2.Hello:
    request = await _next(requests, "Hello", timeout_s)
    if request is None or request.WhichOneof("message") != "hello":
        raise InvalidRequestError("the first message of a Draft stream is Hello", param="hello")
    return request.hello


async def _is_connected(requests: Requests, timeout_s: float) -> bool:
    """Return whether the proposer uses the data connection that Welcome offers."""
    request = await _next(requests, "DataConnected", timeout_s)
    if request is None or request.WhichOneof("message") != "data_connected":
        raise InvalidRequestError(
            "DataConnected answers a Welcome that offers a data connection", param="data_connected"
        )
    return request.data_connected.used


async def _next(requests: Requests, what: str, timeout_s: float) -> draft_pb2.DraftRequest | None:
    """Return None if the proposer has closed its side. Raises `DeadlineError`."""
    try:
        async with asyncio.timeout(timeout_s):
            return await anext(requests, None)
    except TimeoutError:
        raise DeadlineError(f"no {what} within {timeout_s:g} s") from None
