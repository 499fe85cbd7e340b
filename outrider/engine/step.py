"""What goes into one forward, and what comes out of it. Frozen."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass
from typing import NamedTuple

from outrider.draft_port import DeviceDrafts
from outrider.draft_tree import DraftProbs, DraftTree
from outrider.engine.batch import RowSlice
from outrider.engine.rounds import Round, chain_round
from outrider.engine.sequence import Sequence
from outrider.engine.tree_mask import depths
from outrider.params import TokenIds
from outrider.types import TokenLogprobs


class ScheduledRow(NamedTuple):  # made in a third of a frozen dataclass's time
    """A row's share of a step: known tokens that lack KV, then drafts to verify.

    With `slice.parents` the drafts are the nodes of a tree, else a chain.
    """

    seq: Sequence
    slice: RowSlice
    draft: TokenIds
    draft_probs: tuple[DraftProbs | None, ...] = ()  # what it was drawn from; empty: point masses

    def round(self, output: TokenIds) -> Round:
        """What became of the draft when verification gave `output`, the last one never drafted."""
        drafted, accepted, parents = len(self.draft), len(output) - 1, self.slice.parents
        if not parents:
            return chain_round(drafted, accepted)
        tree = DraftTree(0, self.draft, tuple(parents))
        node = tree.descend(output[:-1])
        assert node is not None, "accepted, but never drafted"
        return Round(drafted, max(depths(parents)) + 1, accepted, not tree.is_leaf(node))


@dataclass(frozen=True, slots=True)
class Step:
    """The frozen input of one forward."""

    rows: tuple[ScheduledRow, ...]
    num_tokens: int
    prompts_only: bool = False  # while all rows that decode wait for drafts
    late: DeviceDrafts | None = None
    """The drafts of all rows, for which the rows' own stand in. Who ignores it verifies these: some
    tokens, so most are refused."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """Per row of the step: what the target chose (empty in mid-prompt), and drafts accepted.

    Of a row's choices the first `accepted` + 1 count; what follows them may be anything.
    """

    choices: Rows[Rows[int]]
    accepted: Rows[int]
    forward_s: float  # packing and the model; of a recorded step all that is recorded
    verify_s: float = 0.0  # what follows: drawing and verification, or only the way to the host
    logprobs: Rows[tuple[TokenLogprobs, ...]] = ()
    """Per row of the step: of its first choices, if it asks for them. Empty if no row does."""
