"""The account of a step, which its drafts do not wait for."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from outrider.draft_port import PostedBlock
from outrider.policy.base import StepDone
from outrider.rounds import USEFUL, BlockFate, Round
from outrider.rows.account import RoundDone
from outrider.rows.tracker import DraftTracker
from outrider.types import Commit, StepEvents, StepTimings
from outrider.vllm.hosted_row import HostedRow


class Emitted(NamedTuple):  # one per row and step: a dataclass takes three times as long
    """The output of a step for a row."""

    row: HostedRow
    commit: Commit
    round: Round
    wrong: bool  # a guess for the next round was
    drafted_by: tuple[str, str]  # proposer and method

    @property
    def first(self) -> bool:
        """True if it is the row's first output."""
        return self.commit.base_len == self.row.num_prompt_tokens


class Scheduled(NamedTuple):
    """The tokens of a step as vLLM scheduled them, by request."""

    tokens: Mapping[str, int] = MappingProxyType({})
    drafted: Mapping[str, Sequence[int]] = MappingProxyType({})  # draft tokens among them

    def prompts(self, first: Collection[str]) -> list[int]:
        """Return the tokens of each request in its prompt, or in its text again.

        `first` had their first output: what was left of a prompt may be one token.
        """
        return [
            num_tokens
            for name, num_tokens in self.tokens.items()
            if name in first or num_tokens > 1 + len(self.drafted.get(name, ()))
        ]


@dataclass(slots=True)
class Step:
    """The step that runs, or ran last."""

    began: float = 0.0
    running: Scheduled = field(default_factory=Scheduled)
    ran: Scheduled = field(default_factory=Scheduled)  # what `timings` is about
    num_prefilling: int = 0
    ended: float = 0.0
    rows: list[HostedRow] = field(default_factory=list)  # that emitted tokens, and go on
    emitted: list[Emitted] = field(default_factory=list)  # that is not counted yet
    counted: bool = True
    chosen_by_device: bool = False  # the drafts of `rows`: it did not see the latest
    num_early_blocks: int = 0  # that came before its result, and are not counted yet
    launched: list[HostedRow] = field(default_factory=list)  # of the rows, those that go on
    timings: StepTimings | None = None  # None: it is accounted for


class Accounting:
    """Counts rounds and blocks, and lets the policy learn. Used on the stepping thread."""

    def __init__(
        self, tracker: DraftTracker, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.tracker = tracker
        self._clock = clock
        self.step = Step()
        self.blocks: list[tuple[HostedRow, PostedBlock, BlockFate]] = []
        """Blocks that came and are not counted yet."""

    def begin_again(self) -> None:
        """Forget the step, after a fault."""
        self.blocks, self.step = [], Step(began=self._clock())

    def finish(self, num_running: int) -> StepEvents | None:
        """Count the step that ended, of so many requests that run; None if it was counted."""
        step, tracker = self.step, self.tracker
        self.settle()
        launched = [(row, row.num_verified) for row in step.launched if not row.ended]
        opened = tracker.launched(launched, max(step.began, step.ended)) if launched else []
        if step.timings is None:
            return None
        steps = tracker.policy.measured.steps
        num_rows = len(step.emitted) + step.num_prefilling
        num_tokens, seconds = step.timings.num_tokens, step.timings.forward_ms * 1e-3
        prompts = step.ran.prompts({each.row.name for each in step.emitted if each.first})
        forgotten = num_tokens == 0  # after a fault
        decoded = num_rows > 0 and not (prompts or forgotten)
        if decoded:
            steps.observe_step(num_rows, num_tokens, seconds)
        rows = [each.row for each in step.emitted]
        done = StepDone(
            num_running=max(1, num_running),
            num_rows=num_rows,
            tokens=sum([len(each.commit.token_ids) for each in step.emitted]),
            at=step.began,
            drafted=sum([drafted > 0 for _, drafted in launched]),
            # As in the native engine: a row goes on from the step before.
            comparable=len(prompts) < num_rows,
            prompt_s=steps.prompts_s(prompts, num_tokens, seconds),
            temperature=sum([row.request.sampling.temperature for row in rows]) / max(1, len(rows)),
        )
        tracker.step_done([row.drafting for row in rows], done, decoded=decoded)
        events = StepEvents(
            (),
            (),
            step.timings,
            set_aside=tuple([row.session_id for row in opened]),
            counts=tracker.account.take(),
        )
        step.timings, step.emitted = None, []
        return events

    def settle(self) -> None:
        """Count the rounds of the last step, once."""
        step = self.step
        going_on = [row for row in self.note_rounds() if not row.ended]
        if going_on:
            self.tracker.choose_rows(going_on, step.num_prefilling, step.ended)
            if step.chosen_by_device:
                self.tracker.chosen([(row, row.num_drafted) for row in going_on])
        if not step.counted:
            step.counted = True
            if not self.tracker.policy.measured.steps.padded:  # else no draft is cut
                for row in step.rows:
                    if row.num_drafted:
                        self.tracker.verifies(row, row.nodes)
            self._count(step.emitted)
        self._tell_of(self.blocks)
        self.blocks = []

    def note_rounds(self, *, undrafted: bool = False) -> list[HostedRow]:
        """Tell the tracker of the last step's rounds, once; return the rows.

        `undrafted`: only of rows without a draft at hand, whose wait depends on it.
        """
        step, n = self.step, self.step.num_early_blocks
        early, later = self.blocks[:n], self.blocks[n:]
        kept = [each for each in early if undrafted and each[0].draft is not None]
        self._tell_of([each for each in early if not undrafted or each[0].draft is None])
        self.blocks, step.num_early_blocks = kept + later, len(kept)
        rounds = [
            (each.row, each.round, each.wrong)
            for each in step.emitted
            if not (each.row.noted or (undrafted and each.row.draft is not None))
        ]
        self.tracker.rounds_done(rounds, step.ended)
        rows = [row for row, _, _ in rounds]
        for row in rows:
            row.noted = True
        return rows

    def _count(self, emitted: Sequence[Emitted]) -> None:
        rounds: list[RoundDone] = []
        for row, commit, round_, _, drafted_by in emitted:
            first = commit.base_len == row.num_prompt_tokens
            done = (row.counters, round_, len(commit.token_ids), drafted_by, commit.base_len, first)
            rounds.append(done)
            if first:
                row.counters.prefill_s = self.step.ended - row.started_at
        seconds = self.step.timings.forward_ms * 1e-3 if self.step.timings else 0.0
        self.tracker.account.rounds(rounds, seconds)

    def block_arrived(self, row: HostedRow, block: PostedBlock, fate: BlockFate) -> None:
        """Note a block. A useful one is counted later: its row can run."""
        if fate is BlockFate.INVALID:
            return
        if fate is USEFUL or not row.noted:  # else whether the row waits may depend on it
            self.blocks.append((row, block, fate))
            return
        before = [each for each in self.blocks if each[0] is row]
        if before:
            self.blocks = [each for each in self.blocks if each[0] is not row]
        self._tell_of([*before, (row, block, fate)])

    def _tell_of(self, blocks: Sequence[tuple[HostedRow, PostedBlock, BlockFate]]) -> None:
        """Tell the tracker of blocks that came."""
        now = self._clock()
        times = [now if block.arrived_at is None else block.arrived_at for _, block, _ in blocks]
        self.tracker.blocks_arrived([(*block, at) for block, at in zip(blocks, times, strict=True)])
