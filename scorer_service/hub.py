"""Where requests, the engine and proposers meet. Lives on the event loop; never blocks."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Iterable

from outrider.draft_tree import DraftTree
from outrider.engine.worker import EngineWorker
from outrider.errors import (
    InvalidRequestError,
    OutriderError,
    ProposerRefusedError,
    UnavailableError,
)
from outrider.rpc import codec
from outrider.types import Commit, Request, StepEvents
from outrider.v1 import draft_pb2
from scorer_service.config import DraftLimits, ServedModel
from scorer_service.metrics import ScorerMetrics
from scorer_service.proposers import AttachedProposer, check_hello, overflow_error
from scorer_service.sessions import Session

_MAX_FAILED_STEPS = 8
_log = logging.getLogger(__name__)


class Hub:
    """Owns the sessions and the attached proposers, and decides who drafts for whom.

    Every method runs on the event loop. The engine's side of each decision is
    `EngineWorker.set_drafting`: a session without a proposer never waits.
    """

    def __init__(
        self,
        worker: EngineWorker,
        served: ServedModel,
        limits: DraftLimits,
        metrics: ScorerMetrics,
    ) -> None:
        self._worker = worker
        self._served = served
        self._limits = limits
        self._metrics = metrics
        self._ids = itertools.count(1)
        self._last_id = 0
        self._sessions: dict[int, Session] = {}
        self._undrafted: dict[int, Session] = {}  # want a proposer and have none
        self._proposers: dict[str, AttachedProposer] = {}
        self._failed_steps = 0  # in a row
        self.failed = asyncio.Event()
        """The engine fails step after step; a new process may do better."""
        self._now = asyncio.get_running_loop().time
        self._idle = asyncio.Event()  # no session
        self._idle.set()

    @property
    def proposers(self) -> tuple[AttachedProposer, ...]:
        return tuple(self._proposers.values())

    # Requests

    def next_session_id(self) -> int:
        self._last_id = next(self._ids)
        return self._last_id

    def submit(self, request: Request, traceparent: str) -> Session:
        """Hands a request to the engine and, if there is one, to a proposer.

        Raises what `EngineWorker.submit` raises.
        """
        self._worker.submit(request)
        asked = request.speculation.num_speculative_tokens
        k = self._served.num_speculative_tokens if asked is None else asked
        prompt = request.prompt_token_ids
        session = Session(
            request=request,
            traceparent=traceparent,
            max_len=min(len(prompt) + request.stop.max_tokens, self._served.max_model_len),
            num_speculative_tokens=k if request.speculation.enabled else 0,
            committed=list(prompt),
            num_draft_tokens=k,
        )
        self._sessions[session.id] = session
        self._idle.clear()
        if session.num_speculative_tokens:
            self._assign(session)
        return session

    def abort(self, session: Session, error: OutriderError | None = None) -> None:
        """Ends a session that the engine may still run; no-op for one that has ended."""
        if session.id in self._sessions:
            self._worker.abort(session.id)
            self._forget(session)
            if session.stats is not None:
                self._metrics.count_request(session.stats, None)
            if error is not None:
                session.mailbox.fail(error)

    def abort_all(self, error: OutriderError) -> None:
        for session in list(self._sessions.values()):
            self.abort(session, error)

    async def wait_idle(self, timeout_s: float) -> bool:
        """Whether all sessions ended within the time."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def on_events(self, events: StepEvents) -> None:
        """What one engine step brought about."""
        for commit in events.commits:  # proposers first: they are what the next step waits for
            session = self._sessions.get(commit.session_id)
            if session is not None:
                self._advance(session, commit)
        for failure in events.failures:
            session = self._sessions.get(failure.session_id)
            if session is not None:
                self._forget(session)
                session.mailbox.fail(failure.error)
        for proposer in self.proposers:
            if proposer.outbox.overflowed:
                self.detach(proposer, overflow_error(self._limits))
        for session_id in events.set_aside:
            self._on_set_aside(session_id)
        if events.timings is not None:
            self._metrics.observe_step(events.timings)
        self._watch_failures(events)

    def _watch_failures(self, events: StepEvents) -> None:
        self._failed_steps = 0 if events.timings is not None else self._failed_steps
        self._failed_steps += bool(events.failures)
        if self._failed_steps >= _MAX_FAILED_STEPS:
            self.failed.set()

    def _advance(self, session: Session, commit: Commit) -> None:
        session.committed += commit.token_ids
        session.num_draft_tokens = commit.num_draft_tokens
        session.stats = commit.stats or session.stats
        proposer = session.proposer
        if commit.finish_reason is not None:
            self._forget(session)
            if commit.stats is not None:
                self._metrics.count_request(commit.stats, commit.finish_reason)
        elif proposer is not None:
            if len(session.committed) < proposer.max_model_len:
                proposer.outbox.commit(session, commit.base_len, commit.token_ids)
            else:
                self._reassign(session)
        session.mailbox.put(commit)

    def _forget(self, session: Session) -> None:
        del self._sessions[session.id]
        self._undrafted.pop(session.id, None)
        if self._release(session):
            self._assign_undrafted()
        if not self._sessions:
            self._idle.set()

    # Proposers

    def attach(self, hello: draft_pb2.Hello) -> AttachedProposer:
        """Takes on a proposer; one of the same id that is still attached is replaced.

        Running sessions without a proposer are opened on it. Raises `ProposerRefusedError` or
        `InvalidRequestError`.
        """
        check_hello(hello, self._served)
        former = self._proposers.get(hello.proposer_id)
        if former is None and len(self._proposers) >= self._limits.max_proposers:
            raise ProposerRefusedError(
                f"{self._limits.max_proposers} proposers are attached already",
                reason="TOO_MANY_PROPOSERS",
            )
        proposer = AttachedProposer(hello, self._served, self._limits)
        if former is not None:
            self.detach(former, UnavailableError("this proposer_id dialled anew"))
        self._proposers[proposer.id] = proposer
        self._count_proposers()
        _log.info("proposer %s attached: %s %s", proposer.id, proposer.method, proposer.model)
        self._assign_undrafted()
        return proposer

    def detach(self, proposer: AttachedProposer, error: OutriderError | None = None) -> None:
        """Lets go of a proposer; its sessions go to others or on without. No-op the second time."""
        if proposer.detached.done():
            return
        proposer.detached.set_result(error)
        del self._proposers[proposer.id]
        self._count_proposers()
        why = f": {error.message}" if error is not None else ""
        _log.info("proposer %s detached%s", proposer.id, why)
        self._move_sessions(proposer)

    def detach_all(self, error: OutriderError) -> None:
        for proposer in self.proposers:
            self.detach(proposer, error)

    def on_goodbye(self, proposer: AttachedProposer) -> None:
        """It drains: its sessions are closed on it at once and drafted for elsewhere."""
        proposer.draining = True
        self._move_sessions(proposer)

    def on_lost(self, proposer: AttachedProposer, lost: draft_pb2.Lost) -> None:
        """It evicted a session: opened anew, here or elsewhere, a few times at most."""
        session = proposer.sessions.get(lost.session)
        if session is not None and session.epoch == lost.epoch:
            session.losses[proposer.id] += 1
            self._reassign(session)

    def on_blocks(self, proposer: AttachedProposer, blocks: Iterable[draft_pb2.Block]) -> None:
        """Hands good blocks to the engine. Stale ones are dropped, bad ones dropped and counted.

        After several bad ones the proposer is detached.
        """
        for block in blocks:
            if proposer.detached.done():
                return
            session = proposer.sessions.get(block.session)
            if session is None and not 0 < block.session <= self._last_id:
                self.on_bad(proposer, f"session {block.session} was never opened")
            elif session is None or block.epoch != session.epoch:
                self._metrics.stale_blocks.inc()
            else:
                self._on_block(proposer, session, block)

    def _on_block(
        self, proposer: AttachedProposer, session: Session, block: draft_pb2.Block
    ) -> None:
        try:
            if block.base_len > len(session.committed):
                raise InvalidRequestError(
                    f"base_len {block.base_len} is beyond what was committed", param="base_len"
                )
            tree = DraftTree.validated(
                block.base_len,
                block.token_ids,
                block.parents,
                vocab_size=self._served.vocab_size,
                max_nodes=self._limits.max_block_tokens,
            )
        except InvalidRequestError as error:
            self.on_bad(proposer, error.message)
        else:
            self._worker.post_block(session.id, tree, proposer.id, block.draft_us)

    def on_bad(self, proposer: AttachedProposer, what: str) -> None:
        """Counts a malformed message; too many end the stream."""
        self._metrics.malformed_blocks.inc()
        proposer.bad_blocks += 1
        _log.warning("proposer %s sent a bad message: %s", proposer.id, what)
        if proposer.bad_blocks >= self._limits.max_bad_blocks:
            self.detach(
                proposer,
                InvalidRequestError(
                    f"{proposer.bad_blocks} malformed messages; the last: {what}",
                    reason="BAD_BLOCKS",
                ),
            )

    def _on_set_aside(self, session_id: int) -> None:
        """The engine no longer waits for a session's proposer: one that keeps up takes over.

        Without such a one the session stays: blocks that come in time are still of use.
        """
        session = self._sessions.get(session_id)
        if session is None or session.proposer is None:
            return
        session.proposer.set_aside_until = self._now() + self._limits.set_aside_s
        other = self._pick(session)
        if other is not None and other is not session.proposer:
            self._reassign(session)

    # Who drafts for whom

    def _pick(self, session: Session) -> AttachedProposer | None:
        now = self._now()
        candidates = [
            proposer
            for proposer in self._proposers.values()
            if proposer.has_room
            and proposer.fits(session)
            and session.losses[proposer.id] <= self._limits.max_reopens
        ]
        return min(
            candidates,
            key=lambda p: (
                p.set_aside_until > now,
                session.losses[p.id],
                codec.METHODS.index(p.method),
                p.load,
            ),
            default=None,
        )

    def _assign(self, session: Session) -> None:
        """Gives a session without a proposer one, or notes that it wants one."""
        proposer = self._pick(session)
        if proposer is None:
            self._undrafted[session.id] = session
            return
        self._undrafted.pop(session.id, None)
        session.proposer = proposer
        session.epoch += 1
        session.num_draft_tokens = k = min(
            session.num_speculative_tokens, proposer.max_draft_tokens
        )
        proposer.sessions[session.id] = session
        proposer.outbox.open(session)
        self._worker.set_drafting(session.id, proposer.id, k)

    def _assign_undrafted(self) -> None:
        for session in list(self._undrafted.values()):
            if not any(proposer.has_room for proposer in self._proposers.values()):
                return
            self._assign(session)

    def _release(self, session: Session) -> bool:
        """Takes a session from its proposer; whether it had one. The engine is not told."""
        proposer = session.proposer
        if proposer is None:
            return False
        session.proposer = None
        del proposer.sessions[session.id]
        proposer.outbox.close(session)
        return True

    def _reassign(self, session: Session) -> None:
        """Moves a session to another proposer or to a new epoch on the same one, or to none."""
        self._release(session)
        self._assign(session)
        if session.proposer is None:
            self._worker.set_drafting(session.id, None, 0)

    def _move_sessions(self, proposer: AttachedProposer) -> None:
        for session in list(proposer.sessions.values()):
            self._reassign(session)

    def _count_proposers(self) -> None:
        for method in codec.METHODS:
            attached = sum(proposer.method == method for proposer in self._proposers.values())
            self._metrics.proposers.labels(method=method).set(attached)
