"""A small gRPC client of the gateway, for the commands that show text in a terminal."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc

from outrider.errors import (
    DeadlineError,
    ProposerRefusedError,
    UnauthenticatedError,
    UnavailableError,
)
from outrider.rpc.channel import open_channel
from outrider.rpc.status import from_rpc_error, nothing_answers
from outrider.v1 import generation_pb2, generation_pb2_grpc, proposer_pb2, proposer_pb2_grpc


async def stream(
    channel: grpc.aio.Channel,
    request: generation_pb2.GenerateRequest,
    *,
    timeout_s: float,
    api_key: str | None = None,
    address: str = "its address",
) -> AsyncIterator[generation_pb2.GenerateResponse]:
    """Yield the pieces of one completion.

    Raises the `OutriderError` that the gateway sent, or `UnavailableError` if nothing answers, in
    whose message `address` stands for the channel's.
    """
    call = generation_pb2_grpc.GenerationServiceStub(channel).Generate(
        request,
        timeout=timeout_s,
        metadata=(("authorization", f"Bearer {api_key}"),) if api_key else (),
    )
    try:
        async for response in call:
            yield response
    except grpc.aio.AioRpcError as error:
        if nothing_answers(error):
            raise UnavailableError(
                f"no gateway answers at {address}: is `outrider serve` running, and is --address "
                "the grpc:// address of its ready line?"
            ) from error
        if error.code() is grpc.StatusCode.UNAUTHENTICATED:
            given = "does not know this API key" if api_key else "asks for an API key"
            raise UnauthenticatedError(f"the gateway {given}: give one with --api-key.") from error
        if "Deadline Exceeded" in (error.details() or ""):  # gRPC's own words: not the gateway's
            raise DeadlineError(f"no complete answer within {timeout_s:g} s") from error
        raise from_rpc_error(error) from error
    finally:
        call.cancel()


async def why_not_attached(proposer_address: str, *, timeout_s: float) -> str:
    """Return what keeps a proposer from its scorer; empty if it is attached.

    Raises `ProposerRefusedError` if it does not fit.
    """
    async with open_channel(proposer_address) as channel:
        stub = proposer_pb2_grpc.ProposerServiceStub(channel)
        try:
            info = await stub.GetProposerInfo(
                proposer_pb2.GetProposerInfoRequest(), timeout=timeout_s
            )
        except grpc.aio.AioRpcError as error:
            return f"no answer from the proposer: {error.details()}"
    for link in info.scorers:
        if link.refused:
            raise ProposerRefusedError(link.last_error)
    return "".join(link.last_error or "lost" for link in info.scorers if not link.connected)
