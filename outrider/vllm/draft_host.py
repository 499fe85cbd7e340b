"""The draft side's view of an engine that runs all its rows in every step.

vLLM decides which rows a step has and what it emits. This module follows it: what each step
committed goes to proposers, and before the next step it says which draft tokens to verify, after
waiting for them as long as all rows together gain by it. It imports no vLLM.

Two threads meet here. The *stepping* thread is vLLM's; the event loop runs the hub, which owns
sessions and proposers. Frozen values cross between them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Final

from outrider.draft_port import MAX_BLOCKS_AT_ONCE, DraftOffer, PostedBlock
from outrider.errors import InternalError
from outrider.features import FeatureSpec, FeatureWindow
from outrider.params import TokenIds
from outrider.policy.adaptive import AdaptivePolicy
from outrider.policy.base import DraftMode, Policy, R, Ready, StepDone
from outrider.policy.drafted_row import DraftedRow
from outrider.policy.tracker import ArrivedBlock, DraftTracker
from outrider.rounds import BlockFate, chain_round, token_kinds
from outrider.types import (
    Commit,
    EngineSnapshot,
    FinishReason,
    Request,
    RequestStats,
    StepEvents,
    StepTimings,
)

_KEPT_STATS: Final = 4096  # of requests that ended, until somebody asks
_log = logging.getLogger(__name__)


class LockstepPolicy(AdaptivePolicy):
    """Every step has all rows: it waits for drafts while all rows together gain by that."""

    def choose_rows(
        self, ready: list[R], waiting: Sequence[R], num_prefilling: int, now: float
    ) -> Ready[R]:
        if not waiting:
            return Ready(ready, now)
        num_rows = len(ready) + len(waiting) + num_prefilling
        step_s = self.measured.costs.round_s(self.num_speculative_tokens)
        wake_at = max([row.drafting.round.deadline for row in waiting])
        if step_s and len(waiting) < num_rows:  # of rows that all wait, each one's patience decides
            gain = sum([row.drafting.measured.gain for row in waiting])
            since = min([row.drafting.round.looked_at or now for row in waiting])
            wake_at = min(wake_at, since + step_s * gain / num_rows)
        return Ready([], wake_at) if now < wake_at else Ready([*ready, *waiting], now)


class HostedRow(DraftedRow):
    """A request of vLLM. Only the stepping thread writes it."""

    def __init__(
        self, name: str, request: Request, max_len: int, stop_ids: Collection[int | None], **kw: Any
    ) -> None:
        super().__init__(request, max_len=max_len, **kw)
        self.name = name
        self.stop_ids = frozenset(stop_ids)
        self.started_at = 0.0
        self.num_verified = 0  # draft tokens in the step that runs
        self.ended = False

    def trim(self, tokens: Sequence[int]) -> tuple[TokenIds, FinishReason | None]:
        """Return what is output of tokens that a step emitted, and why the request ends, if so."""
        room = self.max_len - len(self.token_ids)
        for i, token in enumerate(tokens):
            if token in self.stop_ids:
                return tuple(tokens[:i]), FinishReason.STOP
        if len(tokens) >= room:
            return tuple(tokens[:room]), FinishReason.LENGTH
        return tuple(tokens), None


class Listener:
    """What a host tells, on the stepping thread; a listener never waits, and never raises."""

    def opened(self, request: Request, traceparent: str) -> None:
        """Tell of a request that begins."""

    def stepped(self, events: StepEvents) -> None:
        """Tell of what a step committed, or of its account."""


@dataclass(slots=True)
class _Step:
    """The step that runs, or ran last."""

    began: float = 0.0
    num_tokens: int = 0
    num_prefilling: int = 0
    rows: Sequence[HostedRow] = ()  # that decode
    launched: Sequence[HostedRow] = ()  # of the rows before, those that go on
    decoded: bool = False  # no row of it processed a prompt
    tokens: int = 0  # committed
    timings: StepTimings | None = None


class _NoHiddenStates:
    """Implements `HiddenStateControl` of an engine that captures none."""

    def give_back(self, window: FeatureWindow, size: int) -> None: ...

    def put_projection(self, spec: FeatureSpec, matrix: bytearray) -> Future[None]:  # noqa: ARG002
        raise InternalError("no proposer that needs hidden states was let in")

    def drop_projection(self, sha256: bytes) -> None: ...


class DraftHost:
    """Implements `DraftingEngine`, and what a hub needs besides, for an engine in lock step."""

    running = True

    def __init__(
        self,
        num_speculative_tokens: int,
        max_model_len: int,
        max_num_seqs: int,
        *,
        policy: Policy | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.features = _NoHiddenStates()
        self.listener = Listener()
        self.tracker = DraftTracker(policy or LockstepPolicy(num_speculative_tokens))
        self._k = num_speculative_tokens
        self._max_model_len = max_model_len
        self._max_num_seqs = max_num_seqs
        self._clock = clock
        self._rows: dict[str, HostedRow] = {}
        self._by_session: dict[int, HostedRow] = {}
        self._last_session = 0
        self._step = _Step()
        self._ended: OrderedDict[str, RequestStats] = OrderedDict()
        self._wakeup = threading.Condition()
        # Under the condition's lock:
        self._offers: deque[tuple[int, DraftOffer]] = deque()
        self._blocks: dict[int, list[PostedBlock]] = {}

    # Any thread: the hub's calls.

    def submit(self, request: Request, constraint: object = None) -> None:
        """Do nothing: vLLM has the request already."""

    def abort(self, session_id: int) -> None:
        """Do nothing: only vLLM ends a request."""

    @property
    def drafting(self) -> bool:
        rows = min(max(1, len(self._rows)), self._max_num_seqs)
        return rows.bit_length() not in self.tracker.policy.undrafted_sizes

    def between_same_steps(self) -> AbstractContextManager[object]:
        return self._wakeup  # its lock may be taken again

    def set_drafting(self, session_id: int, offer: DraftOffer) -> None:
        with self._wakeup:
            self._offers.append((session_id, offer))
            self._wakeup.notify()

    def post_blocks(self, blocks: Iterable[PostedBlock]) -> None:
        with self._wakeup:
            for block in blocks:
                queue = self._blocks.setdefault(block.session_id, [])
                queue.append(block)
                del queue[:-MAX_BLOCKS_AT_ONCE]
            self._wakeup.notify()

    def snapshot(self) -> EngineSnapshot:
        """Return how many requests run; vLLM's own metrics tell of its cache."""
        undrafted = self.tracker.policy.undrafted_sizes
        return EngineSnapshot(len(self._rows), 0, 0, 0, undrafted)

    # The stepping thread.

    def open(
        self, name: str, request: Request, stop_ids: Collection[int | None], traceparent: str = ""
    ) -> None:
        """Begin a request that vLLM names `name`, in place of one of that name."""
        if name in self._rows:
            self._close(name)
        now, prompt_len = self._clock(), len(request.prompt_token_ids)
        max_len = min(prompt_len + request.stop.max_tokens, self._max_model_len)
        row = HostedRow(name, request, max_len, stop_ids, drafting=self.tracker.start(request))
        row.started_at = now
        self._rows[name] = self._by_session[request.session_id] = row
        self.listener.opened(request, traceparent)

    def reopen(self, name: str, token_ids: Sequence[int]) -> None:
        """Begin a request again with the text that vLLM has of it, in a session of its own."""
        row = self._rows[name]
        text = replace(
            row.request,
            session_id=self.next_session_id(),
            prompt_token_ids=tuple(token_ids),
            stop=replace(row.request.stop, max_tokens=max(1, row.max_len - len(token_ids))),
        )
        _log.warning("the text of %s changed: its proposer begins again", name)
        self.open(name, text, row.stop_ids)

    def next_session_id(self) -> int:
        self._last_session += 1
        return self._last_session

    def begin_step(
        self,
        finished: Iterable[str],
        scheduled: Mapping[str, int],
        verified: Mapping[str, Sequence[int]],
    ) -> None:
        """Note what vLLM is about to run: tokens, and draft tokens among them, by request."""
        step = self._step
        for name in finished:
            self._close(name)
        step.launched = [row for row in step.rows if row.name in scheduled]
        if not scheduled:
            return
        step.began, step.num_tokens = self._clock(), sum(scheduled.values())
        for name, tokens in verified.items():
            if (row := self._rows.get(name)) is not None:
                row.num_verified = len(tokens)
        if len(step.launched) < len(step.rows):
            for row in step.rows:
                if row.name not in scheduled and not row.ended:
                    self.tracker.preempted(row)

    def account(self) -> None:
        """Count the step that ended, while the device works on the next one."""
        step, tracker = self._step, self.tracker
        launched = [(row, row.num_verified) for row in step.launched if not row.ended]
        opened = tracker.launched(launched, step.began) if launched else []
        if step.timings is None:
            return
        policy, counts = tracker.policy, tracker.counts
        counts.output_tokens += step.tokens
        counts.way = policy.mode.value
        if step.decoded:
            plain_s = policy.measured.costs.steps.estimate(len(step.rows))
            counts.plain_s += plain_s * step.tokens / max(1, len(step.rows))
        drafting = [row.drafting for row in step.rows]
        temperatures = [row.request.sampling.temperature for row in step.rows]
        ids = frozenset([d.proposer_id for d in drafting if d.proposer_id is not None])
        policy.step_done(
            StepDone(
                num_running=max(1, len(self._rows)),
                num_rows=len(step.rows),
                tokens=step.tokens,
                at=step.began,
                drafted=sum([drafted > 0 for _, drafted in launched]),
                comparable=step.decoded and bool(ids),
                answered=sum([d.awaited.blocks > 0 for d in drafting]),
                temperature=sum(temperatures) / max(1, len(temperatures)),
                proposer_ids=ids,
                may_run_ahead=any(d.proposer.runs_ahead for d in drafting),
            )
        )
        events = StepEvents(
            (),
            (),
            step.timings,
            set_aside=tuple([row.session_id for row in opened]),
            counts=tracker.take_counts(),
            on_demand=policy.mode is DraftMode.ON_DEMAND,
        )
        step.timings = None
        self.listener.stepped(events)

    def commit(self, names: Sequence[str], emitted: Sequence[Sequence[int]]) -> None:
        """Commit what the step emitted for its rows; nothing for one within its prompt.

        The caller saw to it that each row's text is vLLM's: see `length`.
        """
        now, step = self._clock(), self._step
        seconds = now - step.began
        rows: list[HostedRow] = []
        commits: list[Commit] = []
        step.tokens, step.num_prefilling, first = 0, 0, False
        for name, tokens in zip(names, emitted, strict=True):
            row = self._rows.get(name)
            if row is None or row.ended:
                continue
            if not tokens:
                step.num_prefilling += 1
                continue
            first |= len(row.token_ids) == row.num_prompt_tokens
            commits.append(self._commit(row, tokens, seconds, now))
            rows.append(row)
        step.decoded = bool(rows) and not first and not step.num_prefilling
        if step.decoded:
            costs = self.tracker.policy.measured.costs
            costs.observe_step(len(rows), step.num_tokens, seconds)
        step.tokens = sum([len(commit.token_ids) for commit in commits])
        step.timings = timings = StepTimings(
            0.0, seconds * 1e3, 0.0, 0.0, 0.0, len(rows), step.num_tokens
        )
        on_demand = self.tracker.policy.mode is DraftMode.ON_DEMAND
        self.listener.stepped(StepEvents(tuple(commits), (), timings, on_demand=on_demand))
        step.rows = rows

    def _commit(self, row: HostedRow, tokens: Sequence[int], seconds: float, now: float) -> Commit:
        base_len, drafted = len(row.token_ids), row.num_verified
        accepted = min(len(tokens) - 1, drafted)
        output, finish_reason = row.trim(tokens)
        row.token_ids += output
        wrong = row.walk(base_len, output, drafted)
        round_ = chain_round(drafted, accepted)
        kept, counters, counts = min(accepted, len(output)), row.counters, self.tracker.counts
        first = base_len == row.num_prompt_tokens
        if output:
            counters.count_round(drafted, kept, row.draft_method)
            if drafted or not first:
                counts.rounds[drafted, kept] += 1
            if drafted:
                proposer_id = row.drafting.proposer_id or ""
                counts.drafted_by[proposer_id] += drafted
                counts.accepted_by[proposer_id] += kept
        if first:
            counters.prefill_s = now - row.started_at
        else:
            counters.score_s += seconds
            counts.score_s += seconds
        self.tracker.round_done(row, round_, wrong, now)
        row.num_verified = 0
        row.ended = finish_reason is not None
        return Commit(
            row.session_id,
            base_len,
            output,
            token_kinds(round_.tried, kept, len(output)),
            0 if row.ended else row.drafting.num_draft_tokens,
            finish_reason,
            self._keep_stats(row) if row.ended else None,
        )

    def choose_drafts(self, names: Sequence[str]) -> list[list[int]]:
        """Return the draft tokens of each row's next round, after waiting for them if that pays."""
        self._take_messages(0.0)
        rows = [row for row in self._step.rows if not row.ended]
        while rows:
            now = self._clock()
            ready = self.tracker.choose_rows(rows, self._step.num_prefilling, now)
            if ready.rows or ready.wake_at <= now:
                break
            self._take_messages(ready.wake_at - now)
        drafts: list[list[int]] = []
        for name in names:
            row = self._rows.get(name)
            drafts.append([] if row is None or row.ended else self._draft(row))
        return drafts

    def _draft(self, row: HostedRow) -> list[int]:
        draft, most = row.draft, min(row.drafting.num_draft_tokens, self._k)
        most = min(most, row.max_len - len(row.token_ids) - 1)  # the last token needs no draft
        if draft is None or most <= 0 or row.drafting.round.committed_at == 0.0:
            return []
        return list(draft.first_path(most, row.draft_node))

    def length(self, name: str) -> int | None:
        """Return how many tokens of a request are known; None if the request is not."""
        row = self._rows.get(name)
        return None if row is None else len(row.token_ids)

    def take_stats(self, name: str) -> RequestStats | None:
        """Return the account of a request that ended, once; of one that runs as far as it is."""
        row = self._rows.get(name)
        if row is not None and not row.ended:
            return row.stats()
        return self._ended.pop(name, None)

    def _keep_stats(self, row: HostedRow) -> RequestStats:
        self._ended[row.name] = stats = row.stats()
        if len(self._ended) > _KEPT_STATS:
            self._ended.popitem(last=False)
        return stats

    def _close(self, name: str) -> None:
        row = self._rows.pop(name, None)
        if row is None:
            return
        del self._by_session[row.session_id]
        self._step.rows = [each for each in self._step.rows if each is not row]
        if not row.ended:  # by a stop string, or aborted
            row.ended, stats = True, self._keep_stats(row)
            end = Commit(row.session_id, len(row.token_ids), (), (), 0, FinishReason.STOP, stats)
            self.listener.stepped(StepEvents((end,), (), None))

    def _take_messages(self, timeout_s: float) -> None:
        """Carry out what the event loop sent; wait for it so long."""
        with self._wakeup:
            if timeout_s > 0.0 and not (self._offers or self._blocks):
                self._wakeup.wait(timeout_s)
            offers, self._offers = self._offers, deque()
            blocks, self._blocks = self._blocks, {}
        for session_id, offer in offers:
            row = self._by_session.get(session_id)
            if row is not None and not row.ended:
                self.tracker.attach(row, offer, self._clock())
        for session_id, queue in blocks.items():
            row = self._by_session.get(session_id)
            if row is not None and not row.ended:
                for block in queue:
                    self._take_block(row, block)

    def _take_block(self, row: HostedRow, block: PostedBlock) -> None:
        if row.drafting.proposer_id != block.proposer_id:
            return
        fate = row.take_block(block.tree, block.method)
        if fate is not BlockFate.INVALID:
            at = self._clock() if block.arrived_at is None else block.arrived_at
            draft_s = block.draft_us * 1e-6
            arrived = ArrivedBlock(
                row, block.tree, fate, block.proposer_id, block.method, draft_s, at
            )
            self.tracker.block_arrived(arrived)
