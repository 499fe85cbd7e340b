"""Where requests, the engine's events and drafts meet. Lives on the event loop; never blocks."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection

from outrider.draft_port import MAX_BLOCKS_AT_ONCE, PostedBlock
from outrider.draft_tree import DraftProbs, DraftTree
from outrider.engine.sampling.constraint import ConstraintEditor
from outrider.engine.worker import EngineWorker
from outrider.errors import InvalidRequestError, OutriderError
from outrider.features import FeatureBatch
from outrider.rpc import codec
from outrider.types import Commit, Request, StepEvents
from outrider.v1 import draft_pb2
from scorer_service.config import DraftLimits, ServedModel
from scorer_service.drafting.attached import AttachedProposer
from scorer_service.drafting.outbox import Outbox
from scorer_service.drafting.registry import ProposerRegistry
from scorer_service.metrics import ScorerMetrics
from scorer_service.sessions import Deliveries, Session

_MAX_FAILED_STEPS = 8
_MAX_BLOCKS = 2**14  # in a message: all streams wait while one is gone through
_log = logging.getLogger(__name__)


class Hub:
    """Owns the sessions; its `roster` owns the proposers. All on the event loop."""

    def __init__(
        self,
        worker: EngineWorker,
        served: ServedModel,
        limits: DraftLimits,
        metrics: ScorerMetrics,
        *,
        clock: Callable[[], float] | None = None,  # the event loop's
    ) -> None:
        self._worker = worker
        self._served = served
        self._limits = limits
        self._metrics = metrics
        self._last_id = 0
        self._sessions: dict[int, Session] = {}
        self.roster = ProposerRegistry(worker, served, limits, metrics, clock=clock)
        self._deliveries = Deliveries()
        self._failed_steps = 0  # in a row
        self.failed = asyncio.Event()
        """The engine broke down, or fails step after step; a new process may do better."""
        self._idle = asyncio.Event()  # no session
        self._idle.set()

    # Requests

    def next_session_id(self) -> int:
        self._last_id += 1
        return self._last_id

    def submit(
        self, request: Request, traceparent: str, constraint: ConstraintEditor | None = None
    ) -> Session:
        """Hands a request to the engine and, if there is one, to a proposer.

        Raises what `EngineWorker.submit` raises.
        """
        self._worker.submit(request, constraint)
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
            self.roster.probe()
            self.roster.assign(session)
        return session

    def abort(self, session: Session, error: OutriderError | None = None) -> None:
        """End a session that the engine may still run; no-op for one that has ended."""
        if session.id in self._sessions:
            self._worker.abort(session.id)
            self._forget(session)
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
        self._deliveries.finish()  # of the step before: a stream merges what waits
        timings = events.timings
        step_us = 0 if timings is None else round((timings.forward_ms + timings.verify_ms) * 1e3)
        if timings is not None:
            self.roster.tell_how(on_demand=events.on_demand)
        if events.features is not None:
            self._send_features(events.features)
        for commit in events.commits:  # proposers first: they are what the next step waits for
            session = self._sessions.get(commit.session_id)
            if session is not None:
                self._advance(session, commit, step_us)
                if session.rounds is not None:
                    session.rounds.commit(commit, timings)
        self._deliveries.deliver()
        for failure in events.failures:
            session = self._sessions.get(failure.session_id)
            if session is not None:
                self._forget(session)
                session.mailbox.fail(failure.error)
        self.roster.detach_slow()
        self.roster.probe()
        for session_id in events.set_aside:
            session = self._sessions.get(session_id)
            if session is not None:
                self.roster.on_set_aside(session)
        if timings is not None and events.counts is not None:
            # When the writers that were woken above have written.
            asyncio.get_running_loop().call_soon(self._metrics.observe_step, timings, events.counts)
        self._watch_failures(events)

    def _send_features(self, batch: FeatureBatch) -> None:
        sent = 0
        for rows in batch.rows:
            session = self._sessions.get(rows.session_id)
            proposer = None if session is None else session.proposer
            if session is None or proposer is None or rows.order.epoch != session.epoch:
                self._worker.features.give_back(rows.window, len(rows.rows))
                continue
            proposer.outbox.features(session, rows)
            sent += len(rows.rows)
        self._metrics.count_features(batch, sent)

    def on_taken(self, outbox: Outbox) -> None:
        """What waited for a proposer is being written."""
        for window, size in outbox.taken_feature_bytes.items():
            self._worker.features.give_back(window, size)
        if outbox.made_room:
            self.roster.assign_undrafted()

    def _watch_failures(self, events: StepEvents) -> None:
        self._failed_steps = 0 if events.timings is not None else self._failed_steps
        self._failed_steps += bool(events.failures)
        if self._failed_steps >= _MAX_FAILED_STEPS or not self._worker.running:
            self.failed.set()

    def _advance(self, session: Session, commit: Commit, step_us: int) -> None:
        session.committed += commit.token_ids
        session.num_draft_tokens = commit.num_draft_tokens
        session.stats = commit.stats or session.stats
        proposer = session.proposer
        if commit.finish_reason is not None:
            self._forget(session)
            self._metrics.count_request(commit.stats, commit.finish_reason)
        elif proposer is not None:
            if len(session.committed) < proposer.max_model_len:
                proposer.outbox.commit(session, step_us)
            else:
                self.roster.reassign(session)
        self._deliveries.put(session.mailbox, commit)

    def _forget(self, session: Session) -> None:
        del self._sessions[session.id]
        self.roster.leave(session)
        if not self._sessions:
            self._idle.set()

    # Drafts

    def on_blocks(self, proposer: AttachedProposer, blocks: Collection[draft_pb2.Block]) -> None:
        """Hands good blocks to the engine. Stale ones are dropped, bad ones dropped and counted.

        After several bad ones the proposer is detached.
        """
        if proposer.detached.done():
            return
        if len(blocks) > _MAX_BLOCKS:
            self.on_bad(proposer, f"{len(blocks)} blocks in a message")
            return
        good: list[PostedBlock] = []
        now = time.perf_counter()  # the same for all: they were drafted in one batch
        if len(blocks) > MAX_BLOCKS_AT_ONCE * len(proposer.sessions):  # than the engine takes
            blocks = _newest(blocks)
        for block in blocks:
            session_id = block.session
            session = proposer.sessions.get(session_id)
            if session is None and not 0 < session_id <= self._last_id:
                self.on_bad(proposer, f"session {session_id} was never opened")
            elif session is None or block.epoch != session.epoch:
                self._metrics.stale_blocks.inc()
            elif (checked := self._checked(proposer, session, block, now)) is not None:
                good.append(checked)
                if not session.drafted:
                    self.roster.on_first_block(proposer, session)
                continue
            if proposer.detached.done():
                break
        if good:
            self._worker.post_blocks(good)

    def _checked(
        self, proposer: AttachedProposer, session: Session, block: draft_pb2.Block, now: float
    ) -> PostedBlock | None:
        """None for a bad one, which is counted."""
        # Reading a field of a message takes longer than what is done with it.
        base_len, method_index, draft_us = block.base_len, block.method_index, block.draft_us
        draft_probs, length = block.draft_probs, len(session.committed)
        max_nodes = self._limits.max_block_tokens
        try:
            if base_len > length:
                raise InvalidRequestError(
                    f"base_len {base_len} is beyond what was committed", param="base_len"
                )
            if method_index >= len(proposer.methods):
                raise InvalidRequestError(
                    f"method_index {method_index} is none of Hello.methods",
                    param="method_index",
                )
            probs: list[DraftProbs] = []
            if draft_probs:
                if len(draft_probs) > max_nodes:  # not worth converting
                    raise InvalidRequestError(
                        "one distribution per token, or none", param="draft_probs"
                    )
                probs = [*map(codec.draft_probs_from_proto, draft_probs)]
            tree = DraftTree.validated(
                base_len, block.token_ids, block.parents, self._served.vocab_size, max_nodes, probs
            )
        except InvalidRequestError as error:
            self.on_bad(proposer, error.message)
            return None
        if session.rounds is not None and base_len == length:
            session.rounds.block(draft_us)
        method = proposer.methods[method_index]
        return PostedBlock(session.id, tree, proposer.id, draft_us, now, method)

    def on_bad(self, proposer: AttachedProposer, what: str) -> None:
        """Count a malformed message; too many end the stream."""
        self._metrics.malformed_blocks.inc()
        proposer.bad_blocks += 1
        _log.warning("proposer %s sent a bad message: %s", proposer.id, what)
        if proposer.bad_blocks >= self._limits.max_bad_blocks:
            self.roster.detach(
                proposer,
                InvalidRequestError(
                    f"{proposer.bad_blocks} malformed messages; the last: {what}",
                    reason="BAD_BLOCKS",
                ),
            )


def _newest(blocks: Collection[draft_pb2.Block]) -> Collection[draft_pb2.Block]:
    """Without those that the engine would drop unseen: checking them all could take seconds."""
    newer: Counter[int] = Counter()
    kept: list[draft_pb2.Block] = []
    for block in reversed(list(blocks)):
        newer[block.session] += 1
        if newer[block.session] <= MAX_BLOCKS_AT_ONCE:
            kept.append(block)
    return kept[::-1]
