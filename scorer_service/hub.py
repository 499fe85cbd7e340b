"""Connects requests, engine events and proposers. Lives on the event loop; never blocks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

from outrider.draft_port import EarlyTokens
from outrider.engine_port import ServedEngine
from outrider.errors import InvalidRequestError, OutriderError
from outrider.features import FeatureBatch
from outrider.types import Commit, Grown, Request, StepEvents, StepTimings, TokenKind
from scorer_service.config import DraftLimits, ServedModel
from scorer_service.drafting.blocks import BlockReceiver
from scorer_service.drafting.registry import ProposerRegistry
from scorer_service.metrics import ScorerMetrics
from scorer_service.round_spans import RoundSpans
from scorer_service.sessions import Session, SessionProposer
from scorer_service.token_columns import TokenColumns

_MAX_FAILED_STEPS = 8  # in a row


class Hub:
    """Owns the sessions; its `registry` owns the proposers."""

    def __init__(
        self,
        engine: ServedEngine,
        served: ServedModel,
        limits: DraftLimits,
        metrics: ScorerMetrics,
        *,
        clock: Callable[[], float] | None = None,  # the event loop's
    ) -> None:
        self._engine = engine
        self._served = served
        self._metrics = metrics
        self._last_id = 0
        self._sessions: dict[int, Session] = {}
        self._drafted: dict[int, Session] = {}  # those that are drafted for
        self.columns: list[TokenColumns] = []
        """Take the plain tokens of the requests of their streams."""
        self.registry = ProposerRegistry(engine, served, limits, metrics, clock=clock)
        self.blocks = BlockReceiver(engine, self.registry, metrics)
        self._failed_steps = 0
        self.failed = asyncio.Event()
        """Set when the engine broke down, or fails step after step."""
        self._idle = asyncio.Event()  # no session
        self._idle.set()

    # Requests

    def next_session_id(self) -> int:
        self._last_id += 1
        return self._last_id

    def submit(
        self,
        request: Request,
        traceparent: str,
        constraint: object = None,
        rounds: RoundSpans | None = None,
    ) -> Session:
        """Hand a request to the engine and, if there is one, to a proposer.

        The engine reports each round if `rounds` are to be noted. Raises the errors of
        `ServedEngine.submit`.
        """
        told = request if rounds is None else replace(request, stream_interval=0)
        asked = request.speculation.num_speculative_tokens
        served = self._served
        k = served.num_speculative_tokens if asked is None else asked
        drafted = served.num_speculative_tokens and not served.drafted_elsewhere
        prompt = request.prompt_token_ids
        session = Session(
            request=request,
            traceparent=traceparent,
            max_len=min(len(prompt) + request.stop.max_tokens, served.max_model_len),
            num_speculative_tokens=k if drafted and request.speculation.enabled else 0,
            committed=list(prompt),
            num_draft_tokens=k,
            rounds=rounds,
        )
        with self._engine.between_same_steps():  # the first step may verify a draft
            self._engine.submit(told, constraint)
            self._sessions[session.id] = session
            self._idle.clear()
            if session.num_speculative_tokens:
                self._drafted[session.id] = session
                self.registry.probe()
                self.registry.assign(session)
        return session

    def abort(self, session: Session, error: OutriderError | None = None) -> None:
        """End a session that the engine may still run; no-op for one that has ended."""
        if session.id in self._sessions:
            self._engine.abort(session.id)
            self._forget(session)
            self._metrics.count_request(session.stats, None)
            if error is not None:
                session.mailbox.fail(error)

    def abort_all(self, error: OutriderError) -> None:
        for session in list(self._sessions.values()):
            self.abort(session, error)

    async def wait_idle(self, timeout_s: float) -> bool:
        """Return whether all sessions ended within the time."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def on_early(self, early: EarlyTokens) -> None:
        """Pass on to proposers what one engine step committed; `on_events` brings the rest.

        A proposer that was asked for no draft hears of tokens with the event that asks for one.
        """
        step_us = round(early.step_s * 1e6)
        for row in early.rows:
            session = self._sessions.get(row.session_id)
            proposer = None if session is None else session.proposer
            if session is None or proposer is None or not session.num_draft_tokens:
                continue
            if len(session.committed) == row.base_len:
                session.committed += row.token_ids
                self._tell(proposer, session, step_us)

    def on_events(self, events: StepEvents) -> None:
        """Pass on the results of one engine step."""
        timings = events.timings
        step_us = 0 if timings is None else round((timings.forward_ms + timings.verify_ms) * 1e3)
        if events.features is not None:
            self._send_features(events.features)
        sessions = self._sessions
        for commit in events.told:  # to proposers before clients, since the next step waits
            session = sessions.get(commit.session_id)
            if session is not None:
                self._advance(session, commit, step_us)
                if session.rounds is not None:
                    session.rounds.commit(commit, timings)
        self._grow(events.grown, timings, step_us)
        for failure in events.failures:
            session = self._sessions.get(failure.session_id)
            if session is not None:
                self._forget(session)
                session.mailbox.fail(failure.error)
        self.registry.detach_slow()
        self.registry.probe()
        for session_id in events.set_aside:
            session = self._sessions.get(session_id)
            if session is not None:
                self.registry.on_set_aside(session)
        if events.counts is not None:
            # After the writers that were woken above have written, and those of streams, which wake
            # a turn later.
            loop = asyncio.get_running_loop()
            loop.call_soon(loop.call_soon, self._metrics.observe_step, timings, events.counts)
        self._watch_failures(events)

    def _send_features(self, batch: FeatureBatch) -> None:
        sent = 0
        for rows in batch.rows:
            session = self._sessions.get(rows.session_id)
            proposer = None if session is None else session.proposer
            if session is None or proposer is None or rows.order.epoch != session.epoch:
                self._engine.features.give_back(rows.window, len(rows.rows))
                continue
            proposer.outbox.features(rows)
            sent += len(rows.rows)
        self._metrics.count_features(batch, sent)

    def _watch_failures(self, events: StepEvents) -> None:
        self._failed_steps = 0 if events.timings or events.commits else self._failed_steps
        refused = (isinstance(each.error, InvalidRequestError) for each in events.failures)
        self._failed_steps += not all(refused)  # what a request asks for is no fault
        if self._failed_steps >= _MAX_FAILED_STEPS or not self._engine.running:
            self.failed.set()

    def _grow(self, grown: Grown, timings: StepTimings | None, step_us: int) -> None:
        """Do what `_advance` does for plain tokens."""
        if self._drafted:
            self._grow_drafted(grown, step_us)
        for columns in self.columns:
            grown = columns.add(grown)
        for commit in grown.commits:
            session = self._sessions.get(commit.session_id)
            if session is not None:
                session.mailbox.put(commit)
                if session.rounds is not None:
                    session.rounds.commit(commit, timings)

    def _grow_drafted(self, grown: Grown, step_us: int) -> None:
        for session_id, base_len, token, num_draft_tokens in zip(*grown, strict=True):
            session = self._drafted.get(session_id)
            if session is None:
                continue
            if session.proposer is not None:
                self._count_round(session.proposer, session, 0)
            if len(session.committed) == base_len:  # else heard early
                session.committed.append(token)
            session.num_draft_tokens = num_draft_tokens
            if session.proposer is not None:
                self._tell(session.proposer, session, step_us)

    def _advance(self, session: Session, commit: Commit, step_us: int) -> None:
        proposer = session.proposer
        if proposer is not None:
            self._count_round(proposer, session, commit.kinds.count(TokenKind.ACCEPTED))
        if session.num_speculative_tokens:
            heard_early = len(session.committed) - commit.base_len
            session.committed += commit.token_ids[heard_early:] if heard_early else commit.token_ids
            session.num_draft_tokens = commit.num_draft_tokens
        if commit.stats is not None:
            session.stats = commit.stats
        if commit.finish_reason is not None:
            self._forget(session)
            self._metrics.count_request(commit.stats, commit.finish_reason)
        elif proposer is not None:
            self._tell(proposer, session, step_us)
        session.mailbox.put(commit)

    def _count_round(self, proposer: SessionProposer, session: Session, accepted: int) -> None:
        if (session.drafted or session.in_vain) and session.num_draft_tokens:
            proposer.round_done(session, accepted)

    def _tell(self, proposer: SessionProposer, session: Session, step_us: int) -> None:
        if len(session.committed) < proposer.max_model_len:
            proposer.outbox.commit(session, step_us)
        else:
            self.registry.reassign(session)

    def _forget(self, session: Session) -> None:
        del self._sessions[session.id]
        self._drafted.pop(session.id, None)
        self.registry.leave(session)
        if not self._sessions:
            self._idle.set()
