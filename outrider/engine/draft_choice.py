"""What of a row's draft its next step verifies: the tree, or the preferred path."""

from __future__ import annotations

from outrider.draft_tree import DraftProbs
from outrider.engine.sampling.verification_rules import is_coupled
from outrider.engine.sequence import Sequence
from outrider.engine.tree_mask import MAX_TREE_NODES
from outrider.params import TokenIds

ChosenDraft = tuple[TokenIds, tuple[int, ...], tuple[DraftProbs | None, ...]]
"""Tokens to verify after the last known one; their parents as in a `DraftTree`, or none for a
chain; what they were drawn from, or nothing for point masses."""

NO_DRAFT: ChosenDraft = ((), (), ())


def choose_draft(seq: Sequence, max_nodes: int) -> ChosenDraft:
    """At most `max_nodes` tokens of the draft at hand.

    A tree is verified as a whole if its proposer drafts on demand. One that runs ahead sends side
    branches for later rounds: they say where its chain may be left, not what else it expects. And
    where what a row may say, or how it is verified, follows from the text before (constraints,
    penalties, rules that are not coupled), one text is drafted: the preferred path.
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
        one_path = seq.drafting.can_run_ahead or seq.edits_logits
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
