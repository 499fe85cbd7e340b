"""The draft side's view of an engine that runs all its rows in every step.

vLLM decides which rows a step has and what it emits. This module follows it: what each step
committed goes to proposers, and before the next step it says which draft tokens to verify, after
waiting for them as long as all rows together gain by it. It imports no vLLM.

Two threads meet here. The *stepping* thread is vLLM's; the event loop runs the hub, which owns
sessions and proposers. Frozen values cross between them.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from outrider.draft_port import (
    ColocatedProposer,
    HiddenStateControl,
    NoHiddenStates,
)
from outrider.draft_tree import DraftTree
from outrider.rounds import chain_outcome
from outrider.rows.tracker import DraftTracker
from outrider.step_times import StepSizes
from outrider.types import (
    Commit,
    EngineSnapshot,
    FinishReason,
    Request,
    RequestStats,
    StepEvents,
    StepTimings,
)
from outrider.vllm.accounting import Accounting, Emitted, Scheduled
from outrider.vllm.ahead.branch_table import BranchTable
from outrider.vllm.ahead.branches import Branches
from outrider.vllm.ahead.placed_drafts import PlacedDrafts
from outrider.vllm.colocated import HostedEngine
from outrider.vllm.hidden_states.hosted import HostedStates
from outrider.vllm.hosted_row import HostedRow
from outrider.vllm.inbox import Inbox
from outrider.vllm.waiting import Lockstep
from outrider.vllm.worker_drafts import WorkerDrafts

if TYPE_CHECKING:
    from torch import Tensor

_NO_DRAFT: Final[list[int]] = []
_KEPT_STATS: Final = 4096  # of requests that ended, until somebody asks
_log = logging.getLogger(__name__)


class Listener:
    """Listener to a host, on the stepping thread; it never waits, and never raises."""

    def opened(self, request: Request, traceparent: str) -> None:
        """Tell of a request that begins."""

    def stepped(self, events: StepEvents) -> None:
        """Tell of what a step committed, or of its account."""


class DraftHost(Inbox):
    """Implements `DraftingEngine`, and what a hub needs besides, for an engine in lock step."""

    running = True

    def __init__(
        self,
        num_speculative_tokens: int,
        max_model_len: int,
        max_num_seqs: int,
        *,
        policy: Lockstep,
        max_graph_rows: int = 0,
        ahead: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Make a host of no requests.

        Steps of at most `max_graph_rows` rows are far faster if all rows have
        `num_speculative_tokens` draft tokens. With `ahead`, each row has room for as many in every
        step, which is scheduled before they are chosen, unless it is `undrafted`.
        """
        super().__init__()
        self.features: HiddenStateControl = NoHiddenStates()
        self._states: HostedStates | None = None
        self.listener = Listener()
        self.tracker = DraftTracker(policy)
        self._policy = policy
        self._k = num_speculative_tokens
        self._max_model_len = max_model_len
        self._max_num_seqs = max_num_seqs
        self._ahead = ahead
        self._max_graph_rows = max_graph_rows
        steps = policy.measured.steps
        steps.padded = ahead or max_graph_rows > 0
        steps.sizes = StepSizes([(n, n * (1 + self._k)) for n in range(1, max_graph_rows + 1)])
        self._clock = clock
        self._rows: dict[str, HostedRow] = {}
        self._by_session: dict[int, HostedRow] = {}
        self._last_session = 0
        self._accounting = Accounting(self.tracker, clock)
        self._branches = Branches(policy, num_speculative_tokens, self._take_messages)
        self.engine = HostedEngine(self._by_session, self._accounting.block_arrived)
        """The host as a proposer on the stepping thread sees it."""
        self._worker: WorkerDrafts | None = None
        self._untold: StepEvents | None = None
        self._ended: OrderedDict[str, RequestStats] = OrderedDict()

    def keep(self, states: HostedStates) -> None:
        """Hand out hidden states; called once, before any request."""
        self.features = self._states = states
        self.engine.features = states.on_thread

    def draft_with(self, proposer: ColocatedProposer) -> None:
        """Let a proposer draft on the stepping thread; called once, before any request."""
        self._worker = WorkerDrafts(proposer, self.engine, self.tracker)

    # Any thread: the hub's calls.

    def submit(self, request: Request, constraint: object = None) -> None:
        """Do nothing: vLLM has the request already."""

    def abort(self, session_id: int) -> None:
        """Do nothing: only vLLM ends a request."""

    @property
    def drafting(self) -> bool:
        rows = min(max(1, len(self._rows)), self._max_num_seqs)
        return rows.bit_length() not in self.tracker.policy.undrafted_sizes

    def snapshot(self) -> EngineSnapshot:
        """Return how many requests run; vLLM's own metrics tell of its cache."""
        undrafted = self.tracker.policy.undrafted_sizes
        return EngineSnapshot(len(self._rows), 0, 0, 0, undrafted)

    # The stepping thread.

    def open(
        self, name: str, request: Request, stop_ids: frozenset[int], traceparent: str = ""
    ) -> HostedRow:
        """Begin a request that vLLM names `name`, in place of one of that name."""
        if name in self._rows:
            self._close(name)
        most = len(request.prompt_token_ids) + request.stop.max_tokens
        row = HostedRow(
            name,
            request,
            self.tracker.start(request),
            max_len=min(most, self._max_model_len),
            stop_ids=stop_ids,
            started_at=self._accounting.step.began,
        )
        self._rows[name] = self._by_session[request.session_id] = row
        self.listener.opened(request, traceparent)
        return row

    def _reopen(self, row: HostedRow, token_ids: Sequence[int]) -> HostedRow:
        """Begin a request again with the text that vLLM has of it, in a session of its own."""
        text = replace(
            row.request,
            session_id=self.next_session_id(),
            prompt_token_ids=tuple(token_ids),
            stop=replace(row.request.stop, max_tokens=max(1, row.max_len - len(token_ids))),
        )
        _log.warning("the text of %s changed: its proposer begins again", row.name)
        return self.open(row.name, text, row.stop_ids)

    def next_session_id(self) -> int:
        self._last_session += 1
        return self._last_session

    def begin_step(
        self,
        finished: Iterable[str],
        scheduled: Mapping[str, int],
        verified: Mapping[str, Sequence[int]],
        began: float | None = None,
    ) -> None:
        """Note what vLLM runs, since `began` or from now on, before any of it is committed.

        That is tokens, and draft tokens among them, by request.
        """
        step, finished = self._accounting.step, list(finished)
        if finished:
            self._accounting.settle()
        for name in finished:
            self._close(name)
        step.launched = [row for row in step.rows if row.name in scheduled]
        if not scheduled:
            return
        step.began = self._clock() if began is None else began
        step.running = Scheduled(scheduled, verified)
        if self._ahead:  # rows without room wait for no draft, and miss none
            wanting = [row for row in step.launched if row.drafting.num_draft_tokens]
            self.tracker.draft_nothing([row for row in wanting if row.name not in verified])
        for name, tokens in verified.items():
            if (row := self._rows.get(name)) is not None:
                row.num_verified = min(row.num_drafted, len(tokens))
        if len(step.launched) < len(step.rows):
            for row in step.rows:
                if row.name not in scheduled and not row.ended:
                    self.tracker.preempted(row)

    def commit(
        self,
        names: Sequence[str],
        emitted: Sequence[Sequence[int]],
        lengths: Sequence[int],
        text: Callable[[int, int], list[int]],
    ) -> None:
        """Commit what the step emitted for its rows; nothing for one within its prompt.

        `lengths` are those of the rows' texts with that, and `text` returns a row's text up to a
        length. What is not needed for the next drafts is left to `account`.
        """
        step = self._accounting.step
        step.num_early_blocks = len(self._accounting.blocks)
        step.ended = now = self._clock()
        step.num_prefilling, step.rows, step.emitted, step.counted = 0, [], [], False
        step.chosen_by_device = False
        commits: list[Commit] = []
        for i, (name, sampled) in enumerate(zip(names, emitted, strict=False)):
            row, tokens = self._rows.get(name), tuple(sampled)
            if row is None or row.ended:
                continue
            if not tokens:
                step.num_prefilling += 1
                continue
            accepted, base_len = len(tokens) - 1, lengths[i] - len(tokens)
            drafted = max(row.num_verified, accepted)  # a filling token was right
            if row.stale or base_len != len(row.token_ids):
                row = self._reopen(row, text(i, base_len))
            tokens, finish_reason = row.trim(tokens)
            round_, kinds = chain_outcome(drafted, accepted, len(tokens))
            offered, num_draft_tokens = row.drafting.offered, row.drafting.num_draft_tokens
            row.token_ids += tokens
            row.num_drafted = row.num_verified = 0
            row.noted = False
            drafted_by = offered.proposer.proposer_id or "", row.draft_method
            wrong = row.walk(base_len, tokens, drafted)
            commit = Commit(
                row.session_id, base_len, tokens, kinds, num_draft_tokens, finish_reason
            )
            commits.append(commit)
            step.emitted.append(Emitted(row, commit, round_, wrong, drafted_by))
            if finish_reason is None:
                step.rows.append(row)
            else:
                row.ended = True
        forward_ms = (now - step.began) * 1e3
        step.ran, num_tokens = step.running, sum(step.running.tokens.values())
        step.timings = StepTimings(0.0, forward_ms, 0.0, 0.0, 0.0, len(step.emitted), num_tokens)
        features = None
        if self._states is not None:
            features = self._states.collect(self._by_session, names, step.rows)
        if self._worker is not None:
            self._worker.grew([each.row for each in step.emitted])
        self._untold = StepEvents(tuple(commits), (), step.timings, features=features)

    def write_branches(self, places: Mapping[str, int], table: BranchTable) -> bool:
        """Write drafts by how the running step may end for its rows; False if there can be none."""
        # States are read, and drafts on this thread are made, before the next step runs.
        if self._states is not None or self._worker is not None:
            return False
        running = self._accounting.step.running.tokens
        rows = [self._rows[name] for name in places if name in running and name in self._rows]
        going_on = [row for row in rows if not row.ended and row.room > 1]
        self._branches.write({row: places[row.name] for row in going_on}, table)
        return True

    def await_branches(self, table: BranchTable, known: Callable[[], bool]) -> bool:
        """Write what comes, and wait for what is worth it; see `Branches.wait`."""
        return self._branches.wait(table, known, self._accounting.step.num_prefilling)

    def add_branches(self, table: BranchTable, known: Callable[[], bool]) -> None:
        """Write the drafts that come until it is `known` how the running step ended."""
        self._branches.add(table, known)

    def chosen(self, lengths: Mapping[str, int]) -> None:
        """Note how many draft tokens the device chose for the rows of the last commit."""
        step = self._accounting.step
        step.chosen_by_device = True
        for row in step.rows:
            row.num_drafted = lengths.get(row.name, 0)
            if row.num_drafted and row.drafting.proposer.colocated:
                row.draft_base = len(row.token_ids)  # of the block that comes while the step runs

    def choose_drafts(self, names: Sequence[str]) -> list[list[int]]:
        """Return the draft tokens of each row's next round, after waiting for them if that pays."""
        drafts = dict.fromkeys(names, _NO_DRAFT)
        rows = [row for row in self._accounting.step.rows if row.name in drafts]
        if self._worker is not None:
            self._take_messages(0.0)
            self._worker.draft(rows)
        if None in [row.draft for row in rows]:
            self._wait_for_drafts(rows)
        for row in rows:
            if row.draft is not None:
                drafts[row.name] = path = self._draft(row, row.draft)
                row.num_drafted = len(path)
        if not self.tracker.policy.measured.steps.padded:  # else shorter drafts save nothing
            self._cut(drafts)
        if not self._ahead and len(rows) == len(names) <= self._max_graph_rows:
            self._fill_up(drafts)
        self.tell()  # last, since the event loop would take the interpreter at once
        return [drafts[name] for name in names]

    def _wait_for_drafts(self, rows: Sequence[HostedRow]) -> None:
        self.tell()  # first, for proposers draft meanwhile
        self._take_messages(0.0)
        undrafted = [row for row in rows if row.draft is None]
        at_hand = [row for row in rows if row.draft is not None]
        num_prefilling = self._accounting.step.num_prefilling
        if not (undrafted and self._policy.may_gain_by_waiting(undrafted, at_hand, num_prefilling)):
            return  # what is known of the rows is noted while the device works
        self._accounting.note_rounds(undrafted=True)
        while True:
            now = self._clock()
            ready = self.tracker.choose_rows(undrafted, num_prefilling, now, at_hand)
            if ready.rows or ready.wake_at <= now:
                return
            self._take_messages(ready.wake_at - now)

    def _draft(self, row: HostedRow, draft: DraftTree) -> list[int]:
        most = min(row.drafting.num_draft_tokens, self._k, row.room)
        return list(draft.first_path(most, row.draft_node))

    def _cut(self, drafts: dict[str, list[int]]) -> None:
        """Leave out draft tokens that are not worth verifying, by their proposers' confidence."""
        step = self._accounting.step
        told = [(row, nodes) for row in step.rows if (nodes := row.nodes).confidences]
        if not told:
            return
        num_rows = len(step.rows) + step.num_prefilling
        num_tokens = num_rows + sum([row.num_drafted for row in step.rows])
        num_others = num_tokens - sum([row.num_drafted for row, _ in told])
        for (row, _), kept in zip(told, self.tracker.cut(told, num_rows, num_others), strict=True):
            row.num_drafted = sum(kept)
            del drafts[row.name][row.num_drafted :]

    def _fill_up(self, drafts: dict[str, list[int]]) -> None:
        """Make all drafts equally long, if there is one; it costs less than it loses without.

        The tokens that are added are wrong, as a rule, and count only where they are not.
        """
        if any(drafts.values()):
            for row in self._accounting.step.rows:
                if (lacking := self._k - row.num_drafted) > 0:
                    drafts[row.name] = drafts[row.name] + row.token_ids[-1:] * lacking

    def tell(self) -> None:
        """Tell the listener what was committed, once."""
        events, self._untold = self._untold, None
        if events is not None:
            self.listener.stepped(events)

    @property
    def reports(self) -> bool:
        """Tell whether a proposer elsewhere hears of the last commit."""
        return any(row.drafting.proposer.reported_to for row in self._accounting.step.rows)

    def account(self) -> None:
        """Count the step that ended, while the device works on the next one."""
        events = self._accounting.finish(len(self._rows))
        if events is not None:
            self.listener.stepped(events)
        self.take_early()
        if self._worker is not None and not self._ahead:
            self._worker.follow()

    def drafts_behind(self, rooms: Mapping[str, int]) -> PlacedDrafts | None:
        """Return the drafts that the device makes behind the running step; see `WorkerDrafts`."""
        return None if self._worker is None else self._worker.place(rooms, self._rows)

    def begin_prompts(self, names: Iterable[str]) -> None:
        """Begin to copy hidden states of prompts among rows, before the next step runs."""
        if self._states is not None:
            rows = [row for name in names if (row := self._rows.get(name)) is not None]
            if prompts := [row for row in rows if not row.num_output_tokens]:
                self._states.begin_prompts(prompts)

    def undrafted(self, names: Iterable[str], *, any_step: bool) -> frozenset[str]:
        """Return the rows that need no room for draft tokens in steps to come.

        Any other has all of it, since a step of shorter drafts saves less time than it loses
        tokens. Without `any_step`, steps of few rows are far faster if all rows have all of it.
        """
        if not any_step and len(self._rows) <= self._max_graph_rows:
            return frozenset()
        return frozenset([name for name in names if not self._drafts(self._rows.get(name))])

    def _drafts(self, row: HostedRow | None) -> bool:
        """Tell whether a row is to have drafts, as far as that is decided."""
        if row is None or not row.drafting.offered.limit:
            return False
        if row.drafting.proposer_id is None:  # one may be found while the prompt runs
            return not row.num_output_tokens and self._policy.drafting
        undecided = row.drafting.stance is None and self._policy.drafting
        return undecided or row.drafting.num_draft_tokens > 0

    def draft_now(self) -> None:
        """Let the proposer on this thread hear of the last commit, for the step after the next."""
        if self._worker is not None:
            self._take_messages(0.0)
            self._worker.draft(self._accounting.step.rows, placed=True)

    def draft_behind(
        self, names: Sequence[str], emitting: Collection[int], tokens: Callable[[], Tensor]
    ) -> None:
        """Let the proposer on this thread launch drafts behind the step that was launched.

        `names` are its rows, those at `emitting` places emit tokens, and `tokens` returns what they
        emit on the device, as in a `VerifyOutput`.
        """
        if self._worker is None:
            return
        self._worker.forget()
        running = self._accounting.step.running
        rows: dict[int, tuple[HostedRow, int]] = {}
        for place in emitting:
            name = names[place]
            row = self._rows.get(name)
            if row is None or row.ended or row.stale or not row.num_output_tokens:
                continue
            num_tokens = 1 + len(running.drafted.get(name, ()))
            if num_tokens == running.tokens.get(name):  # else its text is computed again
                rows[place] = row, num_tokens
        if self._states is not None:
            self._states.read_ahead(rows)
        verifying = [
            (row.session_id, len(row.token_ids), place, row.num_verified, wanted, False)
            for place, (row, _) in rows.items()
            if (wanted := row.drafting.num_draft_tokens)
        ]
        self._worker.launch(verifying, tokens)

    def take_early(self) -> None:
        """Take in what came while the device works, so as not to delay the next drafts by it."""
        self._take_messages(0.0)

    def distrust(self) -> None:
        """Take all rows' texts for wrong, after a fault: they begin again."""
        for row in self._rows.values():
            row.stale = True
        untold, self._untold = self._untold, None
        if untold is not None and untold.features is not None:
            for rows in untold.features.rows:
                self.features.give_back(rows.window, len(rows.rows))
        self._accounting.begin_again()

    def take_stats(self, name: str) -> RequestStats | None:
        """Return the account of a request; of one that vLLM has forgotten, once."""
        self._accounting.settle()
        row = self._rows.get(name)
        return self._ended.pop(name, None) if row is None else row.stats()

    def _close(self, name: str) -> None:
        row = self._rows.pop(name, None)
        if row is None:
            return
        self.tracker.learn([row])
        del self._by_session[row.session_id]
        self._accounting.step.rows = [
            each for each in self._accounting.step.rows if each is not row
        ]
        self._ended[name] = stats = row.stats()
        if len(self._ended) > _KEPT_STATS:
            self._ended.popitem(last=False)
        if row.stale or not row.ended:  # a fault kept its end back; a stop string, or aborted
            row.ended = True
            end = Commit(row.session_id, len(row.token_ids), (), (), 0, FinishReason.STOP, stats)
            self.listener.stepped(StepEvents((end,), (), None))

    def _take_messages(self, timeout_s: float) -> list[HostedRow]:
        """Carry out what the event loop sent; wait for it so long. Returns rows with blocks."""
        offers, works, blocks = self.take(timeout_s)
        for session_id, offer in offers:
            row = self._by_session.get(session_id)
            if row is not None and not row.ended:
                self.tracker.attach(row, offer, self._clock())
                if self._states is not None:
                    self._states.follow(row, offer.features)
        for session, work in works:
            if session is None or session in self._by_session:
                work(self.engine)
        changed = []
        for session_id, queue in blocks.items():
            if min(map(self.engine.post_block, queue)):
                changed.append(self._by_session[session_id])
        return changed
