"""What of a row's draft its next step verifies: the tree, or the preferred path."""

from __future__ import annotations

from typing import NamedTuple

from outrider.draft_tree import DraftProbs
from outrider.engine.rules import is_coupled
from outrider.engine.sequence import Sequence
from outrider.engine.tree_mask import MAX_TREE_NODES
from outrider.params import TokenIds


class ChosenDraft(NamedTuple):
    """Tokens to verify after the last known one."""

    token_ids: TokenIds = ()
    parents: tuple[int, ...] = ()  # as in a `DraftTree`; empty: a chain
    probs: tuple[DraftProbs | None, ...] = ()  # what they were drawn from; empty: point masses


NO_DRAFT = ChosenDraft()


def choose_draft(seq: Sequence, max_tokens: int) -> ChosenDraft:
    """At most K tokens of the draft at hand, and at most `max_tokens`.

    A tree is verified as a whole if its proposer drafts on demand. One that runs ahead sends side
    branches for later rounds: they say where its chain may be left, not what else it expects. And
    where what a row may say, or how it is verified, follows from the text before (constraints,
    penalties, rules that are not coupled), one text is drafted: the preferred path.
    """
    if seq.draft is None:
        return NO_DRAFT
    max_nodes = min(seq.drafting.num_draft_tokens, max_tokens)
    # The last token that a request can commit needs no draft, and no KV.
    max_depth = seq.max_len - len(seq.token_ids) - 1
    if max_nodes <= 0 or max_depth <= 0:
        return NO_DRAFT
    one_path = seq.drafting.runs_ahead or seq.edits_logits or seq.draft.is_chain
    if not one_path and is_coupled(seq.request):
        tree = seq.draft.below(seq.draft_node, min(max_nodes, MAX_TREE_NODES), max_depth)
        if not tree.is_chain:
            return ChosenDraft(tree.token_ids, tree.parents)
    path = seq.draft.first_path(min(max_nodes, max_depth), seq.draft_node)
    if seq.constraint is not None:
        # A token that was drawn is rejected, not left out: what follows depends on it.
        drawn = bool(seq.draft.probs)
        path = path[: seq.constraint.num_allowed(path) + drawn]
    return ChosenDraft(path, (), seq.draft.first_probs(len(path), seq.draft_node))
