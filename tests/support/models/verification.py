"""Verification as it is defined, a row at a time: what the engine does with tensors, readably.

`target_probs` [vocab] is after all processing: edits, temperature, top-k, top-p and min-p.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from outrider.draft_tree import DraftProbs
from outrider.params import TokenIds


def verify(draft_tokens: Sequence[int], target_choices: Sequence[int]) -> int:
    """Return how many drafted tokens are accepted.

    `target_choices[i]` is what the target chooses after draft_tokens[:i], so there is one choice
    more than there are drafts. A drafted token is accepted exactly when it equals the target's
    choice and all before it were accepted. The round then commits target_choices[: accepted + 1]:
    the accepted tokens, which are the target's choices too, and one more, chosen where the draft
    was rejected (recovered) or after all of it (bonus). Under the coupled rule a choice is the
    target's own draw, whatever was drafted, so the draft cannot change the text; under the others
    (`verification_rules`) it may follow the draft.
    """
    assert len(target_choices) == len(draft_tokens) + 1
    accepted = 0
    while accepted < len(draft_tokens) and draft_tokens[accepted] == target_choices[accepted]:
        accepted += 1
    return accepted


def verify_tree(
    draft_tokens: Sequence[int], parents: Sequence[int], target_choices: Sequence[int]
) -> tuple[int, ...]:
    """Return the accepted nodes of a tree, from the root down.

    `target_choices[0]` is what the target chooses before all nodes (parent -1), and
    `target_choices[1 + i]` what it chooses after node i and its ancestors. The walk goes to the
    child that equals the choice, the first of them, as long as there is one. The round then commits
    the choices along it: the tokens of its nodes, and one more.
    """
    path: list[int] = []
    node = -1
    while True:
        children = (i for i in range(len(parents)) if parents[i] == node)
        chosen = next((i for i in children if draft_tokens[i] == target_choices[node + 1]), None)
        if chosen is None:
            return tuple(path)
        path.append(node := chosen)


def rejection(
    drafted: int,
    draft_probs: DraftProbs | None,
    target_probs: Sequence[float],
    uniform: float,
    noise: Sequence[float],
) -> int:
    """Return the choice at one drafted place; `noise` is standard Gumbel noise, one per token.

    Without `draft_probs` the draft is a point mass. Where rounding leaves nothing of the residual,
    the draw is from the target's own distribution.
    """
    ids, probs = draft_probs or ((drafted,), (1.0,))
    total = sum(probs)  # float32 values sum to 1 only about
    residual = [*target_probs]
    for token, prob in zip(ids, probs, strict=True):
        residual[token] = max(0.0, residual[token] - prob / total)
    if uniform * probs[ids.index(drafted)] / total < target_probs[drafted]:
        return drafted
    weights = residual if any(residual) else target_probs
    scores = [math.log(p) + g if p > 0 else -math.inf for p, g in zip(weights, noise, strict=True)]
    return scores.index(max(scores))


def block(
    draft: TokenIds,
    draft_probs: Sequence[DraftProbs | None],
    target_probs: Sequence[Sequence[float]],
    uniforms: Sequence[float],
    noise: Sequence[Sequence[float]],
) -> list[int]:
    """Return the choices at all drafted places, given what `rejection` is given at each.

    `ratio` is how likely the target is to write the draft so far, over how likely the proposer was
    to draw it, capped at 1 from place to place. A round ends at the last place that passes. (Sun et
    al. 2024, arXiv 2403.10444, algorithm 2.)
    """
    ratio, accepted = 1.0, 0
    recovered: list[int] = []
    for i, token in enumerate(draft):
        ids, probs = draft_probs[i] or ((token,), (1.0,))
        total = sum(probs)
        residual = [ratio * prob for prob in target_probs[i]]
        for t, prob in zip(ids, probs, strict=True):
            residual[t] = max(0.0, residual[t] - prob / total)
        left, missing = sum(residual), 1 - ratio
        # All of both is 0 where the draft is what the target would write.
        if i and uniforms[i - 1] * (left + missing) <= left:
            accepted = i
        weights = residual if any(residual) else target_probs[i]
        scores = [
            math.log(p) + g if p > 0 else -math.inf for p, g in zip(weights, noise[i], strict=True)
        ]
        recovered.append(scores.index(max(scores)))
        ratio = min(1.0, ratio * target_probs[i][token] * total / probs[ids.index(token)])
    if uniforms[-1] < ratio:
        accepted = len(draft)
    return [*draft[:accepted], *recovered[accepted:]]


def typical(
    drafted: int, target_probs: Sequence[float], drawn: int, epsilon: float, alpha: float
) -> int:
    """Return the choice at one drafted place; `drawn` is the target's own coupled draw."""
    entropy = -sum(p * math.log(p) for p in target_probs if p > 0)
    threshold = min(epsilon, alpha * math.exp(-entropy))
    return drafted if target_probs[drafted] > threshold else drawn


def top_p_window(
    draft: TokenIds,
    target_probs: Sequence[Sequence[float]],
    allowed: Sequence[bool],
    drawn: Sequence[int],
    max_candidate_len: int,
    verify_window: int,
) -> list[int]:
    """Return the choices at all drafted places; `drawn` are the target's coupled draws.

    Candidates are the likeliest tokens that top_k, top_p and min_p leave, at most
    `max_candidate_len` of them, with ties. Another draft needs a whole window of drafts after it
    that are likeliest tokens, and must be `allowed`, that is not masked.
    """
    ranks = [sum(p > probs[t] for p in probs) for t, probs in zip(draft, target_probs, strict=True)]
    choices = []
    for i, token in enumerate(draft):
        candidate = ranks[i] < max_candidate_len and target_probs[i][token] > 0
        window = ranks[i + 1 : i + 1 + verify_window]
        agrees = allowed[i] and len(window) == verify_window and not any(window)
        choices.append(token if candidate or agrees else drawn[i])
    return choices
