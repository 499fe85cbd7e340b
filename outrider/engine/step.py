"""What goes into one forward, and what comes out of it. Frozen."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from outrider.draft_tree import DraftProbs, DraftTree
from outrider.engine.attention.tree_mask import MAX_TREE_NODES, depths
from outrider.engine.batch import RowSlice
from outrider.engine.rounds import Round, chain_round
from outrider.engine.sampling.verification_rules import is_coupled
from outrider.engine.sequence import Sequence
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
        """Return what became of the draft; the last token of `output` was never drafted."""
        drafted, accepted, parents = len(self.draft), len(output) - 1, self.slice.parents
        if not parents:
            return chain_round(drafted, accepted)
        tree = DraftTree(0, self.draft, tuple(parents))
        node = tree.descend(output[:-1])
        assert node is not None, "accepted, but never drafted"
        return Round(drafted, max(depths(parents)) + 1, accepted, not tree.is_leaf(node))


ChosenDraft = tuple[TokenIds, tuple[int, ...], tuple[DraftProbs | None, ...]]
"""Tokens to verify; their parents as in a `DraftTree`, or none for a chain; what they were sampled
from, or nothing for point masses."""

NO_DRAFT: ChosenDraft = ((), (), ())


def choose_draft(seq: Sequence, max_nodes: int) -> ChosenDraft:
    """Return at most `max_nodes` tokens of the draft at hand, to be verified.

    A tree is verified as a whole if its proposer drafts on demand. One that runs ahead sends side
    branches for later rounds, so only its preferred path is verified. So it is where what a row may
    say, or how it is verified, follows from the text before (constraints, penalties, rules that are
    not coupled).
    """
    draft, node = seq.draft, seq.draft_node
    if draft is None:
        return NO_DRAFT
    # The last token that a request can commit needs no draft, and no KV.
    max_depth = seq.max_len - len(seq.token_ids) - 1
    if max_nodes <= 0 or max_depth <= 0:
        return NO_DRAFT
    max_len = max_nodes if max_nodes < max_depth else max_depth
    if draft.is_chain:
        path = draft.token_ids[node + 1 : node + 1 + max_len]
    else:
        one_path = seq.drafting.proposer.can_run_ahead or seq.edits_logits
        if not one_path and is_coupled(seq.request):
            tree = draft.below(node, min(max_nodes, MAX_TREE_NODES), max_depth)
            if not tree.is_chain:
                return tree.token_ids, tree.parents, ()
        path = draft.first_path(max_len, node)
    if seq.constraint is not None:
        # A token that was drawn is rejected, not left out: what follows depends on it.
        drawn = bool(draft.probs)
        path = path[: seq.constraint.num_allowed(path) + drawn]
    return path, (), draft.first_probs(len(path), node) if draft.probs else ()


class DeviceDrafts(NamedTuple):
    """Draft tokens that the device has when a step begins, and the host only later."""

    tokens: Tensor  # int32 [at least sessions, at least draft tokens]
    places: Mapping[int, int]  # by session: which of the rows
    lengths: Mapping[int, int]  # by session: how many of its tokens


@dataclass(frozen=True, slots=True)
class Step:
    """The frozen input of one forward."""

    rows: tuple[ScheduledRow, ...]
    num_tokens: int
    prompts_only: bool = False  # while all rows that decode wait for drafts
    late: DeviceDrafts | None = None
    """The drafts of all rows, for which the rows' own stand in. Who ignores it verifies these: some
    tokens, so most are refused."""


class VerifyOutput(NamedTuple):
    """Where the device will have what comes of a step that is in flight."""

    rows: Rows[ScheduledRow]  # that have some: not in the middle of a prompt
    tokens: Tensor
    """int [at least rows, 1 + width]: per row, drafts accepted, then what the target chose."""


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
