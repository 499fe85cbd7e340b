"""ScorerService: token ids in, token ids out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any

import grpc

from outrider.errors import DeadlineError, UnavailableError
from outrider.rpc import status
from outrider.rpc.decoding import tolerant
from outrider.rpc.feature_codec import features_to_proto, response_to_bytes
from outrider.rpc.telemetry import Metadata, Telemetry
from outrider.rpc.versions import PROTOCOL_VERSION, STEPS_VERSION
from outrider.types import Commit
from outrider.v1 import draft_pb2, scorer_pb2, scorer_pb2_grpc
from scorer_service.call import SERVICE_NAME, Call, Serving
from scorer_service.steps import StepsRequests, StepsStream

Context = grpc.aio.ServicerContext[Any, Any]


class ScorerServicer(scorer_pb2_grpc.ScorerServiceServicer):
    """Answers UNAVAILABLE before `begin` and, to new requests, after `drain`."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        self._serving: Serving | None = None
        self._draining = False
        self._streams: set[StepsStream] = set()

    def begin(self, serving: Serving) -> None:
        self._serving = serving

    async def drain(self, grace_s: float) -> None:
        """Take no new request, and end those with UNAVAILABLE that outlast `grace_s`."""
        self._draining = True
        if self._serving is None:
            return
        hub, error = self._serving.hub, UnavailableError("the scorer is shutting down")
        if not await hub.wait_idle(grace_s):
            hub.abort_all(error)
        for stream in self._streams:
            stream.finish()
        hub.registry.detach_all(error)

    async def Generate(  # type: ignore[override]  # noqa: N802
        self, request: scorer_pb2.ScorerServiceGenerateRequest, context: Context
    ) -> None:
        responses = self.generate(request, context.invocation_metadata(), context.time_remaining())
        try:
            # gRPC would close a generator that is cancelled only when it is collected.
            async with aclosing(responses):
                async for response in responses:
                    await context.write(response)
        except Exception as error:
            await status.abort(context, error)

    async def GenerateSteps(  # type: ignore[override]  # noqa: N802
        self, request_iterator: StepsRequests, context: Context
    ) -> None:
        stream = StepsStream(self._telemetry, self.accept)
        self._streams.add(stream)
        try:
            await stream.serve(request_iterator, context.write)
        except Exception as error:
            await status.abort(context, error)
        finally:
            self._streams.discard(stream)

    async def Draft(  # type: ignore[override]  # noqa: N802
        self, request_iterator: AsyncIterator[draft_pb2.DraftRequest], context: Context
    ) -> None:
        try:
            await self._ready().drafts.serve(request_iterator, context)
        except Exception as error:
            await status.abort(context, error)

    async def GetScorerInfo(  # noqa: N802
        self, _request: scorer_pb2.GetScorerInfoRequest, context: Context
    ) -> scorer_pb2.GetScorerInfoResponse:
        try:
            serving = self._ready(even_draining=True)
            return _info(serving, await serving.drafts.attached())
        except Exception as error:
            await status.abort(context, error)

    def accept(self) -> Serving:
        """Return what serves a new request. Raises `OutriderError`s; others may accept none."""
        return self._ready()

    def _ready(self, *, even_draining: bool = False) -> Serving:
        if self._serving is None:
            raise UnavailableError("the scorer is starting")
        if self._draining and not even_draining:
            raise UnavailableError("the scorer is shutting down")
        return self._serving

    async def generate(
        self,
        message: scorer_pb2.ScorerServiceGenerateRequest,
        metadata: Metadata | None,
        timeout_s: float | None,
    ) -> AsyncGenerator[scorer_pb2.ScorerServiceGenerateResponse, None]:
        """Yield the messages of a request's answer. Closing the generator aborts the request.

        Raises `OutriderError`s.
        """
        with Call(self._telemetry, message, metadata) as call:
            session = await call.submit(self.accept)
            deadline = None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s
            try:
                commits: list[Commit] = []
                while not commits or commits[-1].finish_reason is None:
                    async with asyncio.timeout_at(deadline):
                        commits = await session.mailbox.take()
                    yield call.response(commits)
            except TimeoutError:
                raise DeadlineError("the request's deadline passed") from None


def add_to_server(servicer: ScorerServicer, server: grpc.aio.Server) -> None:
    """Register the service, with serializers of its own for the streams."""
    draft = grpc.stream_stream_rpc_method_handler(
        servicer.Draft,
        request_deserializer=draft_pb2.DraftRequest.FromString,
        response_serializer=response_to_bytes,
    )
    steps = grpc.stream_stream_rpc_method_handler(
        servicer.GenerateSteps,
        request_deserializer=tolerant(scorer_pb2.GenerateStepsRequest.FromString),
        response_serializer=scorer_pb2.GenerateStepsResponse.SerializeToString,
    )
    scorer_pb2_grpc.add_ScorerServiceServicer_to_server(servicer, server)
    # In the place of the generated ones.
    server.add_registered_method_handlers(SERVICE_NAME, {"Draft": draft, "GenerateSteps": steps})


def _info(
    serving: Serving, proposers: Sequence[scorer_pb2.AttachedProposer]
) -> scorer_pb2.GetScorerInfoResponse:
    served, snapshot = serving.served, serving.engine.snapshot()
    return scorer_pb2.GetScorerInfoResponse(
        scorer_id=served.scorer_id,
        model=served.model,
        served_model_name=served.served_model_name,
        vocab_size=served.vocab_size,
        tokenizer_hash=served.tokenizer_hash,
        max_model_len=served.max_model_len,
        protocol_version=PROTOCOL_VERSION,
        eos_token_ids=sorted(served.eos_token_ids),
        dtype=served.dtype,
        running_requests=snapshot.running,
        waiting_requests=snapshot.waiting,
        total_pages=snapshot.total_pages,
        page_size=served.page_size,
        free_pages=snapshot.free_pages,
        features=features_to_proto(served.features),
        proposers=proposers,
        steps_version=STEPS_VERSION,
        adapters=served.adapters,
    )
