"""The requests of an engine: those that wait, and those that run and have pages."""

from __future__ import annotations

from collections import deque

from outrider.config import EngineConfig
from outrider.counts import Admission
from outrider.engine.kv_cache.block_pool import BlockPool
from outrider.engine.sampling.constraint import ConstraintEditor
from outrider.engine.sequence import Sequence
from outrider.engine.step import ScheduledRow
from outrider.policy.base import Policy
from outrider.rows.tracker import DraftTracker
from outrider.types import Request


class Queues:
    """FIFO admission, and preemption by recompute, the youngest first."""

    def __init__(self, config: EngineConfig, policy: Policy, pool: BlockPool) -> None:
        self.config = config
        self.tracker = DraftTracker(policy)
        self.pool = pool
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # by admission: the oldest first
        self.by_session: dict[int, Sequence] = {}
        self._now = 0.0  # of `schedule`
        self.wake_at = 0.0  # when `schedule` returned None: ask again then at the latest

    def add(
        self,
        request: Request,
        max_len: int,
        stop_ids: frozenset[int],
        now: float,
        constraint: ConstraintEditor | None = None,
    ) -> None:
        """Queue a request, with the editor that enforces its constraint."""
        seq = Sequence(
            request,
            max_len=max_len,
            stop_ids=stop_ids,
            drafting=self.tracker.start(request),
            submitted_at=now,
            constraint=constraint,
        )
        self.by_session[seq.session_id] = seq
        self.waiting.append(seq)

    def remove(self, session_id: int) -> None:
        """Forget a session, wherever it is, and free its pages at once."""
        seq = self.by_session.pop(session_id)
        (self.running if seq.admitted else self.waiting).remove(seq)
        seq.admitted = False
        # A step in flight may still write to them, but no later step runs before it.
        self.pool.release(seq.block_table)

    def _publish(self, seq: Sequence) -> None:
        """Offer pages that this step filled with committed tokens to other sequences."""
        page_size = self.config.page_size
        full = min(seq.num_computed, len(seq.token_ids)) // page_size
        if self.config.enable_prefix_caching:
            hashes = seq.hashes(full, page_size)
            for i in range(seq.num_published, full):
                self.pool.publish(seq.block_table[i], hashes[i])
        seq.num_published = full

    def _admit(self) -> None:
        """Move waiting requests to the running ones while rows and pages last, in order."""
        if not self.waiting or len(self.running) >= self.config.max_num_seqs:
            return
        promised = sum(self._missing_pages(seq, len(seq.token_ids) + 1) for seq in self.running)
        while self.waiting and len(self.running) < self.config.max_num_seqs:
            seq = self.waiting[0]
            length, page_size = len(seq.token_ids), self.config.page_size
            shared: list[int] = []
            if self.config.enable_prefix_caching and not seq.wants_prompt_logits:
                # At least one token is left to compute: its forward yields the next one.
                num_pages = (length - 1) // page_size
                shared = self.pool.match(seq.hashes(num_pages, page_size)[:num_pages])
            needed = self._missing_pages(seq, length + 1) - len(shared)
            if needed + self.pool.num_unused(shared) + promised > self.pool.num_free:
                return
            promised += needed
            self.waiting.popleft()
            self.running.append(seq)
            self.pool.share(shared)
            seq.block_table = shared
            seq.num_computed = len(shared) * page_size
            seq.num_published = len(shared)
            seq.admitted = True
            queue_s = self._now - seq.queued_at
            seq.counters.queue_s += queue_s
            if not seq.counters.preemptions:
                seq.counters.cached_prompt_tokens = seq.num_computed
                self.tracker.account.counts.admissions.append(
                    Admission(queue_s, seq.num_prompt_tokens, seq.num_computed)
                )

    def _cover(self, seq: Sequence, length: int, rows: dict[int, ScheduledRow]) -> bool:
        """Give a sequence pages for `length` tokens, preempting the youngest rows if need be.

        False if the sequence itself was the youngest. The oldest row is never preempted for
        another, and always fits: that is why there is no livelock.
        """
        missing = self._missing_pages(seq, length)
        while missing > self.pool.num_free:
            victim = self.running.pop()
            rows.pop(victim.session_id, None)
            self._preempt(victim)
            if victim is seq:
                return False
        seq.block_table += [self.pool.allocate() for _ in range(missing)]
        return True

    def _preempt(self, seq: Sequence) -> None:
        """Take a row's pages; it is recomputed when it is admitted again."""
        self.pool.release(seq.block_table)
        seq.block_table = []
        seq.num_computed = seq.num_published = 0
        if seq.wants_prompt_logits:
            seq.prompt_logprobs = []
        seq.admitted = False
        seq.queued_at = self._now
        self.waiting.appendleft(seq)
        self.tracker.preempted(seq)

    def _missing_pages(self, seq: Sequence, length: int) -> int:
        return max(0, -(-length // self.config.page_size) - len(seq.block_table))

    def check_invariants(self) -> None:
        """Raise `AssertionError` unless sequences, queues and pages agree."""
        sequences = list(self.by_session.values())
        self.pool.check_invariants(seq.block_table for seq in sequences)
        assert len(sequences) == len(self.running) + len(self.waiting)
        assert {id(seq) for seq in sequences} == {id(s) for s in (*self.running, *self.waiting)}
        assert len(self.running) <= self.config.max_num_seqs
        for seq in sequences:
            capacity = len(seq.block_table) * self.config.page_size
            assert seq.num_computed <= min(len(seq.token_ids) - 1, capacity), "computed too far"
            assert len(seq.token_ids) < seq.max_len, "should have ended"
            assert seq.num_published == seq.num_computed // self.config.page_size
            if seq.draft is not None:
                path = seq.token_ids[seq.draft.base_len :]
                assert seq.draft.descend(path) == seq.draft_node, "the draft is not of this text"
                assert not seq.draft.is_leaf(seq.draft_node)
            assert seq.admitted or not seq.block_table, "a waiting request holds pages"
            assert seq.admitted == (seq in self.running)
