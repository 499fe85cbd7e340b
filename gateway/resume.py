"""One request on the scorers: if one dies mid-stream, another continues the same text.

Sampling is coupled to the seed and the absolute position, so a scorer given the prompt and the
tokens so far goes on exactly as the first one would have.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, asynccontextmanager

from opentelemetry.trace import Span

from gateway.account import Account
from gateway.intake import GenerationRequest
from gateway.routing.rounds import Round, TakeRound
from gateway.routing.scorer import Scorer
from gateway.routing.scorers import ScorerPool
from outrider.errors import CapacityError, UnavailableError
from outrider.params import StopParams
from outrider.rpc.codec import (
    constraint_to_proto,
    sampling_to_proto,
    speculation_to_proto,
    stop_to_proto,
)
from outrider.rpc.telemetry import Telemetry, inject
from outrider.types import FinishReason
from outrider.v1 import scorer_pb2

_MAX_FAILURES = 4
"""Scorers in a row that may die under a request without adding a token: it might be the cause."""
_FULL_RETRY_S = 0.1
_log = logging.getLogger(__name__)


class Resumer:
    """Streams requests from the pool's scorers; `on_retry` is told when one is moved."""

    def __init__(
        self,
        pool: ScorerPool,
        telemetry: Telemetry,
        resume_timeout_s: float,
        hold_timeout_s: float,
        on_retry: Callable[[], None],
    ) -> None:
        self._pool = pool
        self._telemetry = telemetry
        self._resume_timeout_s = resume_timeout_s
        self._hold_timeout_s = hold_timeout_s
        self._on_retry = on_retry

    async def stream(
        self,
        request: GenerationRequest,
        account: Account,
        parent: Span,
        deadline: float,
        take_round: TakeRound | None = None,
    ) -> AsyncGenerator[Round, None]:
        """Yield the request's rounds from as many scorers as it takes; `deadline` is loop time.

        Rounds that `take_round` takes are left out.

        Raises what the scorer refuses the request with; `UnavailableError` if no scorer is left
        to continue on; `DeadlineError`. Closing the generator cancels the RPC.
        """
        committed: list[int] = []
        failures = 0
        full: frozenset[Scorer] = frozenset()
        give_up: float | None = None  # set by the first failure since the last token
        held_until = min(deadline, _now() + self._hold_timeout_s)

        def take(round_: Round) -> bool:
            assert take_round is not None
            if give_up is not None or not take_round(round_):
                return False
            account.observe(round_.kinds)
            committed.extend(round_.token_ids)
            return True

        while True:
            patience = held_until if give_up is None else give_up
            scorer = await self._pool.pick(request.affinity, full, patience - _now())
            message = _continuation(request, committed)
            try:
                async with self._segment(
                    scorer, message, account, parent, deadline, take if take_round else None
                ) as rounds:
                    async for round_ in rounds:
                        account.observe(round_.kinds)
                        if round_.usage is not None and round_.aux_info is not None:
                            account.report(round_.usage, round_.aux_info)
                        if round_.token_ids:
                            committed += round_.token_ids
                            failures, give_up, full = 0, None, frozenset()
                        yield round_
                        if round_.finish_reason is not None:
                            return
                raise UnavailableError("The scorer ended its answer early.")
            except CapacityError:
                # Another one may have room. A request that one had taken waits rather than fails.
                give_up = self._patience(deadline) if give_up is None else give_up
                full |= {scorer}
                if not set(self._pool.serving) - full:
                    if not (committed or failures) or _now() >= give_up:
                        raise
                    full = frozenset()
                    await asyncio.sleep(_FULL_RETRY_S)
            except UnavailableError as error:
                give_up = self._patience(deadline) if give_up is None else give_up
                self._pool.mark_down(scorer)
                failures += 1
                if failures >= _MAX_FAILURES or _now() >= give_up:
                    raise
                account.retries += 1
                self._on_retry()
                _log.warning(
                    "request %s: scorer %s failed after %d tokens (%s); continuing elsewhere",
                    *(request.request_id, scorer.target, len(committed), error.message),
                )
                if ended := self._ended(request, committed):
                    yield ended
                    return

    @asynccontextmanager
    async def _segment(
        self,
        scorer: Scorer,
        message: scorer_pb2.ScorerServiceGenerateRequest,
        account: Account,
        parent: Span,
        deadline: float,
        take_round: TakeRound | None,
    ) -> AsyncGenerator[AsyncGenerator[Round, None], None]:
        """Give what one scorer adds, within a span and a segment of the account."""
        with self._telemetry.client_span(
            "outrider.v1.ScorerService/Generate", parent, {"server.address": scorer.target}
        ) as span:
            left_s = max(0.0, deadline - _now())
            rounds = scorer.generate(message, inject(span), left_s, take_round)
            try:
                async with aclosing(rounds):
                    yield rounds
            finally:
                account.end_segment()

    def _patience(self, deadline: float) -> float:
        return min(deadline, _now() + self._resume_timeout_s)

    def _ended(self, request: GenerationRequest, committed: list[int]) -> Round | None:
        """Return the last round if the scorer died between its last token and saying so."""
        length = len(request.prompt_token_ids) + len(committed)
        if len(committed) < request.stop.max_tokens and length < self._pool.max_model_len:
            return None
        return Round((), (), FinishReason.LENGTH)


def _continuation(
    request: GenerationRequest, committed: list[int]
) -> scorer_pb2.ScorerServiceGenerateRequest:
    done = len(committed)
    stop = StopParams(
        max_tokens=request.stop.max_tokens - done,
        stop_token_ids=request.stop.stop_token_ids,
        ignore_eos=request.stop.ignore_eos,
        min_tokens=max(0, request.stop.min_tokens - done),
    )
    return scorer_pb2.ScorerServiceGenerateRequest(
        request_id=request.request_id,
        prompt_token_ids=[*request.prompt_token_ids, *committed],
        sampling=sampling_to_proto(request.sampling),
        stop=stop_to_proto(stop),
        speculation=speculation_to_proto(request.speculation),
        running_stats=bool(request.stop_strings),
        constraint=constraint_to_proto(request.constraint),
        top_logprobs=request.top_logprobs,
        prompt_logprobs=None if request.num_resumed + done else request.prompt_logprobs,
        num_resumed_tokens=request.num_resumed + done,
        tenant=request.tenant,
        stream_interval=request.interval,
        adapter=request.adapter,
        draft_trees=request.draft_trees,
    )


def _now() -> float:
    return asyncio.get_running_loop().time()
