"""Rows in two halves: one is verified while another device drafts for the other.

With t(n) the seconds of a step of n rows and D(n) those until they have their drafts, all rows
together have a round in t(n) + D(n), and each device stands still while the other works. Halves
have one in t(n / 2) + max(t(n / 2), D(n / 2)). But no round is shorter than the drafts of both
halves, which are made one after the other, or than the steps of both.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows

from outrider.engine.sequence import Sequence


def pay_off(step_s: float, together_s: float, delay_s: float, drafting_s: float) -> bool:
    """Return whether halves are faster than all rows together.

    `step_s` is a half's step, and `together_s` a round of all rows. `delay_s` is the time until
    drafts come, `drafting_s` of it for drafting.

    With the network time w the proposer keeps up if drafting_s <= step_s + w. The rest of the delay
    is w, and once the proposer is never idle, drafting_s - step_s: so only half of it counts.
    """
    return 2 * step_s <= together_s and drafting_s <= step_s + (delay_s - drafting_s) / 2


def half(num_rows: int) -> int:
    """Return how many rows a microbatch has at most."""
    return -(-num_rows // 2)


def next_half(ready: list[Sequence], num_waiting: int) -> list[Sequence]:
    """Return the rows of the next microbatch: of the ready ones those that waited longest."""
    most = half(len(ready) + num_waiting)
    if len(ready) <= most:
        return ready
    return sorted(ready, key=lambda seq: seq.drafting.round.committed_at)[:most]


def start_at(num_ready: int, due_times: Rows[float], step_s: float, now: float) -> float:
    """Return when a microbatch starts, with other rows' drafts due at `due_times`, in order.

    Waiting for the rows that it lacks delays each ready row. Going without them makes each lacking
    row wait for the rest of the step when its draft has come.
    """
    missing = half(num_ready + len(due_times)) - num_ready
    if missing <= 0:
        return now
    wait_s = due_times[missing - 1] - now
    pays = not num_ready or num_ready * wait_s < missing * (step_s - wait_s)
    return now + wait_s if pays else now
