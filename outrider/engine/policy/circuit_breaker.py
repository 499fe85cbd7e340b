"""A row goes into a step: whether it had its draft, why not, and who is waited for no longer.

A proposer whose drafts were waited for in vain several times in a row is set aside: its row rests,
waits for nothing for some rounds, and then tries it once more.
"""

from __future__ import annotations

from outrider.counts import StepCounts
from outrider.engine.rounds import Drafting
from outrider.engine.sequence import Sequence

SET_ASIDE_AFTER = 3  # rounds in a row whose draft was waited for in vain
FIRST_REST = 16  # rounds before it is waited for again; doubles up to MAX_REST
MAX_REST = 256
FIRST_PATIENCE_S = 0.25  # a proposer must process the prompt before its first block
WAIT_FADE = 0.8  # per round, of the moving average of waits
HIT_FADE = 0.9  # per round, of the share of hits


def owed(seq: Sequence) -> bool:
    """Whether the row waits for drafts, and its proposer has not said that it has none."""
    d = seq.drafting
    return d.waits and d.no_guess_at != len(seq.token_ids)


def count_launch(seq: Sequence, drafted: int, counts: StepCounts, now: float) -> bool:
    """A row goes into a step with `drafted` tokens. True if its proposer is set aside by it.

    Adds to the row's counters, to what is known of its drafts, and to `counts`.
    """
    d, c = seq.drafting, seq.counters
    c.iter_count += 1
    at_hand = d.looked_at is None or d.at_hand  # processing its prompt it waited for nothing
    if drafted and at_hand:
        c.hits += 1
        counts.fates[d.proposer_id or "", "hit"] += 1
    if d.looked_at is None:  # nor did it miss anything
        return False
    wanted = owed(seq) or (d.at_hand and d.num_draft_tokens > 0)
    _count_hit(seq, wanted, drafted, counts)
    waited = now - d.looked_at if not d.at_hand and d.waits else 0.0
    if waited > 0.0:
        c.waits += 1
        c.wait_s += waited
        counts.wait_s += waited
    d.wait_s = WAIT_FADE * d.wait_s + (1 - WAIT_FADE) * waited
    if drafted:
        d.misses = d.next_rest = 0
        return False
    c.fallback_rounds += d.limit > 0
    if seq.draft is not None:  # there was a draft, which this step did not verify
        return False
    if d.committed_at < d.deadline <= now:
        d.in_vain = d.committed_at, now
    if d.rest:
        d.rest -= 1
        return False
    in_vain = wanted and (d.deadline > d.committed_at or _silent(d, now))
    return in_vain and _set_aside(d)


def _count_hit(seq: Sequence, wanted: bool, drafted: int, counts: StepCounts) -> None:
    """Hits, and misses by cause, of a round that `wanted` a draft."""
    d, c = seq.drafting, seq.counters
    if not wanted:
        d.hit = None
        return
    # What is left of a late draft is no hit: only a proposer that runs ahead means it so.
    fresh = d.runs_ahead or seq.draft_base == len(seq.token_ids)
    hit = d.at_hand and fresh
    if d.hit is not None:
        (c.after_hit if d.hit else c.after_miss)[hit] += 1
    d.hit = hit
    d.hit_share += ((hit and not d.colocated) - d.hit_share) * (1 - HIT_FADE)
    if not d.at_hand and (d.runs_ahead or not drafted):
        c.misses_wrong += d.wrong
        c.misses_late += not d.wrong
        counts.fates[d.proposer_id or "", "wrong" if d.wrong else "late"] += 1


def _silent(d: Drafting, now: float) -> bool:
    """A proposer from which nothing has come for so long is missed, waited for or not."""
    return not d.blocks and now > d.awaited_since + FIRST_PATIENCE_S


def _set_aside(d: Drafting) -> bool:
    """A draft was waited for in vain. Whether its proposer is set aside now."""
    d.misses += 1
    # Tried again after a rest, it gets one chance.
    if d.misses < (1 if d.next_rest else SET_ASIDE_AFTER):
        return False
    d.misses, d.next_rest = 0, min(2 * d.next_rest or FIRST_REST, MAX_REST)
    d.rest = d.next_rest
    return True
