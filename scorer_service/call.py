"""One request from its arrival to its end, whichever RPC carries it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

from outrider.engine_port import ServedEngine
from outrider.errors import InvalidRequestError
from outrider.rpc import codec
from outrider.rpc.latency import RequestTimes
from outrider.rpc.telemetry import Metadata, Telemetry, inject
from outrider.types import Commit, EngineInfo, Request, RequestStats
from outrider.v1 import common_pb2, scorer_pb2
from scorer_service.config import ServedModel
from scorer_service.constraints import Constraints
from scorer_service.drafting.side import DraftSide
from scorer_service.hub import Hub
from scorer_service.round_spans import RoundSpans
from scorer_service.sessions import Session

SERVICE_NAME: Final = "outrider.v1.ScorerService"
_STATS_ON_SPANS: Final = (
    *("rounds", "drafted", "accepted", "hits", "misses_late", "misses_wrong", "fallback_rounds"),
    *("queue_ms", "prefill_ms", "propose_ms", "score_ms", "wait_ms", "network_ms"),
    *("cached_prompt_tokens", "proposer_ids", "preemptions"),
)


@dataclass(frozen=True, slots=True)
class Serving:
    """The parts that answer RPCs once the engine is up."""

    engine: ServedEngine
    hub: Hub
    served: ServedModel
    info: EngineInfo
    constraints: Constraints | None  # None: the engine compiles them itself
    drafts: DraftSide


class Call:
    """A request, its span and its messages; leaving the context aborts what still runs."""

    def __init__(
        self,
        telemetry: Telemetry,
        message: scorer_pb2.ScorerServiceGenerateRequest,
        metadata: Metadata | None,
    ) -> None:
        self._started = time.perf_counter()
        self._telemetry = telemetry
        self._message = message
        self.tells_drafts = message.draft_trees  # that were verified
        self._serving: Serving | None = None
        self._session: Session | None = None
        self._rounds: RoundSpans | None = None
        self.first_token_s: float | None = None
        self._open_span = telemetry.server_span(
            f"{SERVICE_NAME}/Generate", metadata, {"outrider.request_id": message.request_id}
        )
        self._span = self._open_span.__enter__()

    async def submit(self, ready: Callable[[], Serving]) -> Session:
        """Hand the request to the engine, once its constraint is compiled.

        `ready` returns what serves, or raises. Raises `OutriderError`s.
        """
        serving = self._serving = ready()
        hub, span = serving.hub, self._span
        request = _request_from_proto(self._message, hub.next_session_id(), serving.served)
        span.set_attributes(_request_attributes(request, serving.served))
        rounds = RoundSpans() if span.is_recording() else None
        constraint = None
        if serving.constraints is not None and request.constraint is not None:
            constraint = await serving.constraints.editor(request)
            ready()  # compiling takes up to seconds
        traceparent = dict(inject(span)).get("traceparent", "")
        session = hub.submit(request, traceparent, constraint, rounds)
        if rounds is not None:
            rounds.submitted()
        self._rounds, self._session = rounds, session
        return session

    def response(self, commits: Sequence[Commit]) -> scorer_pb2.ScorerServiceGenerateResponse:
        """Return one message for `commits`, which are several if the client reads slowly."""
        response = self.details(commits)
        response.token_ids.extend([token for commit in commits for token in commit.token_ids])
        response.kinds.extend([codec.KIND_TO_PROTO[k] for commit in commits for k in commit.kinds])
        return response

    def details(self, commits: Sequence[Commit]) -> scorer_pb2.ScorerServiceGenerateResponse:
        """Return the same without tokens and their kinds."""
        self.note_tokens(commits)
        response = scorer_pb2.ScorerServiceGenerateResponse(
            logprobs=[codec.logprobs_to_proto(each) for c in commits for each in c.logprobs]
        )
        for commit in commits:
            if commit.draft is not None:
                base_len, token_ids, parents = commit.draft
                response.drafts.add(base_len=base_len, token_ids=token_ids, parents=parents)
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
            self._account(response, last.stats)
        return response

    def note_tokens(self, commits: Sequence[Commit]) -> None:
        """Note the time of the first tokens."""
        if self.first_token_s is None and any(commit.token_ids for commit in commits):
            self.first_token_s = time.perf_counter() - self._started

    def _account(
        self, response: scorer_pb2.ScorerServiceGenerateResponse, stats: RequestStats
    ) -> None:
        assert self._serving is not None
        served = self._serving.served
        elapsed_s = time.perf_counter() - self._started
        response.usage.CopyFrom(codec.usage(stats))
        response.aux_info.CopyFrom(
            codec.aux_info(stats, cost_time_ms=elapsed_s * 1e3, scorer_id=served.scorer_id)
        )
        if response.finish_reason:
            times = RequestTimes(elapsed_s, self.first_token_s, stats.output_tokens)
            self._telemetry.latency.record("generate", served.served_model_name, times, self._span)

    def end(self, error: BaseException | None = None) -> None:
        """Abort what still runs, and end the span, with the error that the request ended with."""
        session = self._session
        stats = None if session is None else session.stats
        if session is not None and self._serving is not None:
            self._serving.hub.abort(session)
        if self._rounds is not None:
            self._telemetry.record(self._span, self._rounds.end(stats))
        # The client may have hung up as soon as it had the last token.
        if stats is not None:
            self._span.set_attributes(_stats_attributes(stats))
        self._open_span.__exit__(
            None if error is None else type(error),
            error,
            None if error is None else error.__traceback__,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _class: type[BaseException] | None,
        error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        self.end(error)


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
        adapter=message.adapter,
        draft_trees=message.draft_trees,
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
