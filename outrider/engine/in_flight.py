"""A step between its launch and its result, and drafts that the device makes behind it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from outrider.draft_port import DeviceDrafts, VerifyingRow, VerifyOutput
from outrider.draft_tree import DraftTree
from outrider.engine.runner import Pending
from outrider.engine.sequence import Sequence
from outrider.engine.step import Step, StepResult
from outrider.types import StepTimings


@dataclass(slots=True)
class InFlight:
    """A step that was launched and not collected."""

    step: Step
    pending: Pending
    began: float  # its scheduling
    scheduled: float
    timings: StepTimings  # as far as they are known
    set_aside: tuple[int, ...] | None = None  # None: the policy does not know of the launch

    def seconds(self, result: StepResult, now: float) -> float:
        """Return how long the step took until `now`, when its `result` came."""
        if self.step.device_drafts is not None:  # the device came to the step after its launch
            return result.forward_s + result.verify_s
        return now - self.scheduled

    def count_drafting(self, seconds: float) -> None:
        """Count time that the engine's thread spent on drafts meanwhile."""
        self.timings = replace(self.timings, draft_ms=self.timings.draft_ms + seconds * 1e3)

    @property
    def verify_output(self) -> VerifyOutput | None:
        """Return where the device will have the step's result; see `Engine.verify_output`."""
        if self.pending.verified is None:
            return None
        rows: list[VerifyingRow] = []
        with_logits = (row for row in self.step.rows if row.slice.num_logits)
        for place, row in enumerate(with_logits):
            wanted = row.seq.drafting.num_draft_tokens
            if wanted and not row.slice.parents and row.seq.constraint is None:
                rows.append(VerifyingRow(row.seq.session_id, place, len(row.draft), wanted))
        return VerifyOutput(rows, self.pending.verified)


def lack_only(drafts: DeviceDrafts, sequences: Mapping[int, Sequence]) -> bool:
    """Return whether `sequences` are rows that lack just these drafts to run."""
    return drafts.lengths.keys() == sequences.keys() and all(
        seq.admitted
        and seq.num_computed == len(seq.token_ids) - 1
        and not seq.needs_eager_sampling  # by drafts that the host has
        for seq in sequences.values()
    )


def hold_places(drafts: DeviceDrafts, sequences: Mapping[int, Sequence]) -> None:
    """Give each row a draft of as many tokens, which the device replaces."""
    for session, num_tokens in drafts.lengths.items():
        seq = sequences[session]
        seq.take_block(DraftTree.chain(len(seq.token_ids), (0,) * num_tokens))
