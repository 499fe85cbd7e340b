"""A small gRPC client of the gateway, for the commands that show text in a terminal."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

import grpc

from outrider.errors import (
    DeadlineError,
    ProposerRefusedError,
    UnauthenticatedError,
    UnavailableError,
)
from outrider.rpc.channel import open_channel
from outrider.rpc.status import from_rpc_error, nothing_answers
from outrider.v1 import (
    common_pb2,
    generation_pb2,
    generation_pb2_grpc,
    proposer_pb2,
    proposer_pb2_grpc,
)


@dataclass(frozen=True, slots=True)
class GenerateOptions:
    """A completion request as a person types it; `None` leaves the choice to the server."""

    prompt: str
    model: str = ""
    max_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    speculation: bool = True
    methods: tuple[str, ...] = ()  # the preferred one first
    num_speculative_tokens: int | None = None
    aux_info: bool = False
    api_key: str | None = None  # travels beside the message

    def to_proto(self) -> generation_pb2.GenerateRequest:
        """Return the message for GenerationService.Generate."""
        return generation_pb2.GenerateRequest(
            model=self.model,
            text=self.prompt,
            sampling=common_pb2.SamplingParams(
                temperature=self.temperature,
                top_k=self.top_k,
                top_p=self.top_p,
                min_p=self.min_p,
                seed=self.seed,
            ),
            stop=common_pb2.StopParams(max_tokens=self.max_tokens, ignore_eos=self.ignore_eos),
            stop_strings=self.stop,
            speculation=common_pb2.SpeculationParams(
                enabled=self.speculation,
                methods=self.methods,
                num_speculative_tokens=self.num_speculative_tokens,
            ),
            aux_info=self.aux_info,
        )


async def stream(
    channel: grpc.aio.Channel, options: GenerateOptions, *, timeout_s: float
) -> AsyncIterator[generation_pb2.GenerateResponse]:
    """Yield the pieces of one completion.

    Raises the `OutriderError` that the gateway sent, or `UnavailableError` if nothing answers.
    """
    call = generation_pb2_grpc.GenerationServiceStub(channel).Generate(
        options.to_proto(),
        timeout=timeout_s,
        metadata=(("authorization", f"Bearer {options.api_key}"),) if options.api_key else (),
    )
    try:
        async for response in call:
            yield response
    except grpc.aio.AioRpcError as error:
        if nothing_answers(error):
            raise UnavailableError(
                "no gateway answers there: is `outrider serve` running, and is --address the "
                "grpc:// address of its ready line?"
            ) from error
        if error.code() is grpc.StatusCode.UNAUTHENTICATED:
            given = "does not know this API key" if options.api_key else "asks for an API key"
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
