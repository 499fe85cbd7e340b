"""A step between its launch and its result: its times, and drafts that are made behind it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from outrider.draft_port import DeviceDrafts, VerifyingRow, VerifyOutput
from outrider.draft_tree import DraftTree, chain_parents, depths
from outrider.engine.runner import Pending
from outrider.engine.sequence import Sequence
from outrider.engine.step import Step, StepResult
from outrider.engine.tree_mask import MAX_TREE_NODES
from outrider.types import StepTimings


@dataclass(slots=True)
class InFlight:
    """A step that was launched and not collected."""

    step: Step
    pending: Pending
    began: float  # its scheduling
    scheduled: float
    timings: StepTimings  # as far as they are known
    behind: bool = False  # it was launched while another step was in flight
    set_aside: tuple[int, ...] | None = None  # None: the policy does not know of the launch
    draft_s: float = 0.0  # that the engine's thread spent on drafts meanwhile

    def seconds(self, result: StepResult, now: float) -> float:
        """Return how long the step took until `now`, when its `result` came."""
        if self.behind or self.step.device_drafts is not None:
            return result.forward_s + result.verify_s  # the device came to it after its launch
        return now - self.scheduled

    @property
    def verify_output(self) -> VerifyOutput | None:
        """Return where the device will have the step's result; see `Engine.verify_output`."""
        if self.pending.verified is None:
            return None
        rows: list[VerifyingRow] = []
        trees = self.step.device_trees
        with_logits = [row for row in self.step.rows if row.slice.num_logits]
        for place, (seq, part, draft, _, _) in enumerate(with_logits):
            wanted = seq.drafting.num_draft_tokens
            if wanted and seq.constraint is None:
                most, is_tree = len(draft), bool(draft and (part.parents or trees))
                if trees is not None:
                    most = min(most, trees.max_depth or most)
                elif part.parents:
                    most = 1 + max(depths(part.parents))
                length = len(seq.token_ids)
                rows.append((seq.session_id, length, place, most, wanted, is_tree))
        return VerifyOutput(rows, self.pending.verified)


class CollectedStep(NamedTuple):
    """A step whose tokens are committed, which took `commit_s`."""

    flight: InFlight
    result: StepResult
    commit_s: float

    @property
    def timings(self) -> StepTimings:
        return replace(
            self.flight.timings,
            forward_ms=self.result.forward_s * 1e3,
            verify_ms=self.result.verify_s * 1e3,
            commit_ms=self.commit_s * 1e3,
            draft_ms=self.flight.timings.draft_ms + self.flight.draft_s * 1e3,
        )


class StepClock:
    """The times of the steps of one engine; `now` is its clock, in seconds."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now
        self._committed_at = now()  # by the last step
        self._result_at: float | None = None  # of the last step, if the next one follows directly
        self._draft_s = 0.0  # of the engine's thread, for the next step

    def count_drafting(self, seconds: float) -> None:
        """Count time that the engine's thread spent on drafts for the next step."""
        self._draft_s += seconds

    def nothing_ready(self) -> None:
        """Note that no step follows the last one directly."""
        self._result_at = None

    def launched(
        self, step: Step, pending: Pending, began: float, scheduled: float, *, behind: bool = False
    ) -> InFlight:
        """Note a step whose scheduling began and ended then, and that was launched just now.

        `behind` says that another step is in flight.
        """
        draft_s, self._draft_s = self._draft_s, 0.0
        gap_ms = None  # with device drafts the device is still busy with these
        if self._result_at is not None and not behind and step.device_drafts is None:
            gap_ms = (self.now() - self._result_at - draft_s) * 1e3
        timings = StepTimings(
            schedule_ms=(scheduled - began) * 1e3,
            forward_ms=0.0,
            verify_ms=0.0,
            commit_ms=0.0,
            idle_ms=0.0 if behind else (began - self._committed_at - draft_s) * 1e3,
            num_rows=step.num_rows,
            num_tokens=step.num_tokens,
            gap_ms=gap_ms,
            draft_ms=draft_s * 1e3,
        )
        return InFlight(step, pending, began, scheduled, timings, behind)

    def result(self) -> float:
        """Note that a step's result came, and return when."""
        self._result_at = now = self.now()
        return now

    def committed(self, since: float) -> float:
        """Note that a step's tokens are committed, and return the seconds since that began."""
        self._committed_at = self.now()
        return self._committed_at - since


def may_stay_on_device(drafts: DeviceDrafts, sequences: Mapping[int, Sequence]) -> bool:
    """Return whether `drafts` are for rows that lack just these, and no other has a draft."""
    chains, drafted = drafts.nodes.parents is None, drafts.lengths
    for session, seq in sequences.items():
        if session not in drafted:
            if seq.draft is not None:
                return False
        elif (
            not (seq.admitted and seq.num_uncomputed == 1 and (chains or seq.coupled))
            or seq.needs_eager_sampling  # by drafts that the host has
        ):
            return False
    return drafted.keys() <= sequences.keys()


def hold_places(drafts: DeviceDrafts, sequences: Mapping[int, Sequence]) -> None:
    """Give each row a chain of as many tokens until the step is scheduled.

    The device replaces it. No path of a tree of n nodes is longer than a chain of n. A tree has no
    more nodes than a mask has bits.
    """
    longest = max(drafts.lengths.values())
    if drafts.nodes.parents is not None:
        longest = min(longest, MAX_TREE_NODES)
    chains = [((0,) * n, chain_parents(n)) for n in range(longest + 1)]
    for session, num_tokens in drafts.lengths.items():
        seq = sequences[session]
        tokens, parents = chains[num_tokens if num_tokens < longest else longest]
        seq.hold_place(DraftTree(len(seq.token_ids), tokens, parents))


def clear_places(drafts: DeviceDrafts, step: Step) -> None:
    """Take from the rows of a step what they held: a tree may be posted with fewer nodes."""
    held = drafts.lengths
    for seq, _, draft, _, _ in step.others:
        if draft and seq.session_id in held:
            seq.draft = None
