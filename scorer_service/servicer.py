"""ScorerService: token ids in, token ids out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final

import grpc
from opentelemetry.trace import Span

from outrider.engine_port import ServedEngine
from outrider.errors import DeadlineError, InvalidRequestError, UnavailableError
from outrider.rpc import codec, status
from outrider.rpc.feature_codec import features_to_proto, response_to_bytes
from outrider.rpc.latency import RequestTimes
from outrider.rpc.telemetry import Metadata, Telemetry, inject
from outrider.rpc.versions import PROTOCOL_VERSION
from outrider.types import Commit, EngineInfo, Request, RequestStats
from outrider.v1 import common_pb2, draft_pb2, scorer_pb2, scorer_pb2_grpc
from scorer_service.config import ServedModel
from scorer_service.constraints import Constraints
from scorer_service.drafting.side import DraftSide
from scorer_service.hub import Hub
from scorer_service.round_spans import RoundSpans

SERVICE_NAME: Final = "outrider.v1.ScorerService"
_STATS_ON_SPANS: Final = (
    *("rounds", "drafted", "accepted", "hits", "misses_late", "misses_wrong", "fallback_rounds"),
    *("queue_ms", "prefill_ms", "propose_ms", "score_ms", "wait_ms", "network_ms"),
    *("cached_prompt_tokens", "proposer_ids", "preemptions"),
)
Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True)
class Serving:
    """The parts that answer RPCs once the engine is up."""

    engine: ServedEngine
    hub: Hub
    served: ServedModel
    info: EngineInfo
    constraints: Constraints | None  # None: the engine compiles them itself
    drafts: DraftSide


class ScorerServicer(scorer_pb2_grpc.ScorerServiceServicer):
    """Answers UNAVAILABLE before `begin` and, to new requests, after `drain`."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        self._serving: Serving | None = None
        self._draining = False

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
        started = time.perf_counter()
        with self._telemetry.server_span(
            f"{SERVICE_NAME}/Generate", metadata, {"outrider.request_id": message.request_id}
        ) as span:
            serving = self._ready()
            hub = serving.hub
            request = _request_from_proto(message, hub.next_session_id(), serving.served)
            span.set_attributes(_request_attributes(request, serving.served))
            rounds = RoundSpans() if span.is_recording() else None
            constraint = None
            if serving.constraints is not None:
                constraint = await serving.constraints.editor(request)
                self._ready()  # compiling takes up to seconds
            session = hub.submit(request, dict(inject(span)).get("traceparent", ""), constraint)
            if rounds is not None:
                rounds.submitted()
                session.rounds = rounds
            call = _Call(self._telemetry, serving.served, span, started)
            deadline = None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s
            try:
                commits: list[Commit] = []
                while not commits or commits[-1].finish_reason is None:
                    async with asyncio.timeout_at(deadline):
                        commits = await session.mailbox.take()
                    yield call.response(commits)
            except TimeoutError:
                raise DeadlineError("the request's deadline passed") from None
            finally:
                hub.abort(session)
                if rounds is not None:
                    self._telemetry.record(span, rounds.end(session.stats))
                # The client may have hung up as soon as it had the last token.
                if session.stats is not None:
                    span.set_attributes(_stats_attributes(session.stats))


def add_to_server(servicer: ScorerServicer, server: grpc.aio.Server) -> None:
    """Register the service, with a serializer of its own for the messages of Draft."""
    draft = grpc.stream_stream_rpc_method_handler(
        servicer.Draft,
        request_deserializer=draft_pb2.DraftRequest.FromString,
        response_serializer=response_to_bytes,
    )
    scorer_pb2_grpc.add_ScorerServiceServicer_to_server(servicer, server)
    server.add_registered_method_handlers(SERVICE_NAME, {"Draft": draft})  # in its place


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
    )


class _Call:
    """Makes response messages and metrics of one request's commits."""

    def __init__(
        self, telemetry: Telemetry, served: ServedModel, span: Span, started: float
    ) -> None:
        self._telemetry = telemetry
        self._served = served
        self._span = span
        self._started = started
        self._first_token_s: float | None = None

    def response(self, commits: Sequence[Commit]) -> scorer_pb2.ScorerServiceGenerateResponse:
        """Return one message for `commits`, which are several if the client reads slowly."""
        elapsed_s = time.perf_counter() - self._started
        response = scorer_pb2.ScorerServiceGenerateResponse(
            token_ids=[token for commit in commits for token in commit.token_ids],
            kinds=[codec.KIND_TO_PROTO[kind] for commit in commits for kind in commit.kinds],
            logprobs=[codec.logprobs_to_proto(each) for c in commits for each in c.logprobs],
        )
        if self._first_token_s is None and response.token_ids:
            self._first_token_s = elapsed_s
        if commits[0].prompt_logprobs is not None:
            response.prompt_logprobs.CopyFrom(
                common_pb2.PromptLogprobs(**commits[0].prompt_logprobs._asdict())
            )
        last = commits[-1]
        if last.finish_reason is not None:
            response.finish_reason = codec.FINISH_TO_PROTO[last.finish_reason]
        if last.stop_token_id is not None:
            response.stop_token_id = last.stop_token_id
        if last.stats is not None:
            response.usage.CopyFrom(codec.usage(last.stats))
            response.aux_info.CopyFrom(
                codec.aux_info(
                    last.stats, cost_time_ms=elapsed_s * 1e3, scorer_id=self._served.scorer_id
                )
            )
            if last.finish_reason is not None:
                times = RequestTimes(elapsed_s, self._first_token_s, last.stats.output_tokens)
                self._telemetry.latency.record(
                    "generate", self._served.served_model_name, times, self._span
                )
        return response


def _request_from_proto(
    message: scorer_pb2.ScorerServiceGenerateRequest, session_id: int, served: ServedModel
) -> Request:
    """Raise `InvalidRequestError`. The engine checks that the prompt fits."""
    sampling = codec.sampling_from_proto(message.sampling, seed=0)
    if not sampling.greedy and not message.sampling.HasField("seed"):
        raise InvalidRequestError("seed must be set if temperature is above 0.", param="seed")
    prompt = tuple(message.prompt_token_ids)
    room = max(1, served.max_model_len - len(prompt))
    return Request(
        session_id=session_id,
        prompt_token_ids=prompt,
        sampling=sampling,
        stop=codec.stop_from_proto(message.stop, default_max_tokens=room),
        speculation=codec.speculation_from_proto(message.speculation),
        running_stats=message.running_stats,
        constraint=codec.constraint_from_proto(message.constraint),
        top_logprobs=message.top_logprobs if message.HasField("top_logprobs") else None,
        prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
        num_resumed_tokens=message.num_resumed_tokens,
        tenant=message.tenant,
        stream_interval=message.stream_interval,
    )


def _request_attributes(request: Request, served: ServedModel) -> dict[str, str | int | float]:
    return {
        "gen_ai.operation.name": "generate",
        "gen_ai.provider.name": "outrider",
        "gen_ai.request.model": served.served_model_name,
        "gen_ai.request.max_tokens": request.stop.max_tokens,
        "gen_ai.request.temperature": request.sampling.temperature,
        "outrider.session": request.session_id,
    }


def _stats_attributes(stats: RequestStats) -> dict[str, str | int | float | tuple[str, ...]]:
    return {
        "gen_ai.usage.input_tokens": stats.prompt_tokens,
        "gen_ai.usage.output_tokens": stats.output_tokens,
        **{f"outrider.{name}": getattr(stats, name) for name in _STATS_ON_SPANS},
    }
