"""Rows in two halves that take turns: one is verified while another device drafts for the other.

With t(n) the seconds of a step of n rows and D(n) those until they have their drafts, all rows
together have a round in t(n) + D(n), and each device stands still while the other works. Halves
have one in t(n / 2) + max(t(n / 2), D(n / 2)): fewer rows are verified sooner, and drafted for
sooner. But no round is shorter than the drafts of both halves, which are made one after the other,
or than the steps of both.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows

from outrider.engine.sequence import Sequence


def pay(step_s: float, together_s: float, delay_s: float, drafting_s: float) -> bool:
    """Whether turns do, with a half's step, and of `delay_s` until drafts come so much drafting.

    `together_s`: a round of all rows, with drafts for all, which come later than a half's: by those
    turns would end as soon as they begin, and begin again.

    With the way w the proposer keeps up if drafting_s <= step_s + w. What drafts do not take of the
    delay is w, and once it is never idle, drafting_s - step_s: so only half of it counts.
    """
    return 2 * step_s <= together_s and drafting_s <= step_s + (delay_s - drafting_s) / 2


def half(num_rows: int) -> int:
    """Rows of a step at most."""
    return -(-num_rows // 2)


def next_half(ready: list[Sequence], num_waiting: int) -> list[Sequence]:
    """Of rows that are ready, those whose turn it is: that had their last round first."""
    most = half(len(ready) + num_waiting)
    if len(ready) <= most:
        return ready
    return sorted(ready, key=lambda seq: seq.drafting.committed_at)[:most]


def begins_at(num_ready: int, dues: Rows[float], step_s: float, now: float) -> float:
    """When a step is to begin of which so many rows are ready, others by their `dues`, in order.

    To wait for the rows that a half lacks takes that long from each that is ready. To go takes from
    each that is lacking what is left of the step when its draft comes.
    """
    missing = half(num_ready + len(dues)) - num_ready
    if missing <= 0:
        return now
    wait_s = dues[missing - 1] - now
    pays = not num_ready or num_ready * wait_s < missing * (step_s - wait_s)
    return now + wait_s if pays else now
