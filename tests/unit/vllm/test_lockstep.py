"""How long a step of all rows waits for the drafts that some of them lack."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from outrider.policy.row import CurrentRound, Drafting, Offered
from outrider.vllm.waiting import LockstepPolicy

K, STEP_S, GAIN = 4, 0.010, 3.0


def policy(num_rows: int, delay_s: float) -> LockstepPolicy:
    """A policy that has seen steps of `STEP_S`, and drafts come after `delay_s`."""
    made = LockstepPolicy(K)
    made.measured.steps.observe_step(num_rows, num_rows * (1 + K), STEP_S)
    times = made.measured.draft_times(row(drafted=False).drafting)
    times.observe(1.0, delay_s, delay_s / 2, K, alone=True)
    return made


def row(*, drafted: bool, deadline: float = 1.0) -> Any:
    d = Drafting(Offered(K), num_draft_tokens=K, drafter="p")
    d.measured.gain = GAIN
    d.round = CurrentRound(committed_at=0.0, deadline=deadline)
    return SimpleNamespace(drafting=d, draft=object() if drafted else None)


@pytest.mark.parametrize(
    ("num_ready", "num_waiting", "delay_s", "waits"),
    [
        (7, 1, 0.0005, True),  # 3 tokens, where a millisecond is worth 2.9
        (7, 1, 0.0015, False),
        (4, 4, 0.0055, True),  # 12 tokens, where a millisecond is worth 2
        (4, 4, 0.0065, False),
    ],
)
def test_step_waits_only_for_drafts_that_bring_more_than_all_rows_commit_meanwhile(
    num_ready: int, num_waiting: int, delay_s: float, waits: bool
) -> None:
    ready = [row(drafted=True) for _ in range(num_ready)]
    waiting = [row(drafted=False) for _ in range(num_waiting)]
    asked = policy(num_ready + num_waiting, delay_s)
    assert asked.may_gain_by_waiting(waiting, ready, 0) is waits  # all drafts are due at once
    got = asked.choose_rows(ready, waiting, 0, 0.0)
    assert (got.rows == []) is waits
    if waits:
        assert got.wake_at == pytest.approx(delay_s)
    else:
        assert len(got.rows) == num_ready + num_waiting


def test_step_that_may_not_gain_by_waiting_would_not_wait_either() -> None:
    rng, told = random.Random(7), set[bool]()
    for _ in range(500):
        ready = [row(drafted=rng.random() < 0.7) for _ in range(rng.randint(1, 8))]
        waiting = [row(drafted=False, deadline=0.1) for _ in range(rng.randint(1, 8))]
        for each in (*ready, *waiting):
            each.drafting.measured.gain = rng.uniform(0.0, K)
        asked = policy(len(ready) + len(waiting), rng.uniform(0.0001, 0.02))
        undrafted = [each for each in (*ready, *waiting) if each.draft is None]
        drafted = [each for each in ready if each.draft is not None]
        if not asked.may_gain_by_waiting(undrafted, drafted, 0):
            assert asked.choose_rows(ready, waiting, 0, 0.0).rows
            told.add(False)
        elif drafted and not asked.choose_rows(ready, waiting, 0, 0.0).rows:
            told.add(True)
    assert told == {False, True}


def test_ready_rows_without_drafts_make_a_step_wait_longer() -> None:
    waiting = [row(drafted=False)]
    without = [row(drafted=False) for _ in range(7)]
    got = policy(8, 0.0015).choose_rows(without, waiting, 0, 0.0)
    assert got.wake_at == pytest.approx(0.0015)


def test_rows_that_all_wait_do_so_until_their_deadlines() -> None:
    waiting = [row(drafted=False, deadline=deadline) for deadline in (0.02, 0.03)]
    asked = policy(2, 0.05)
    got = asked.choose_rows([], waiting, 0, 0.0)
    assert (got.rows, got.wake_at) == ([], 0.02)
    got = asked.choose_rows(waiting[:1], waiting[1:], 0, 0.02)
    assert (got.rows, got.wake_at) == ([], 0.03), "its draft is worth the time"


def test_overdue_drafts_are_awaited_no_longer_than_they_are_worth() -> None:
    ready = [row(drafted=True) for _ in range(7)]
    late = policy(8, 0.0005)
    assert late.choose_rows(ready, [row(drafted=False, deadline=0.1)], 0, 0.0006).rows
    assert not late.choose_rows(ready, [row(drafted=False, deadline=0.001)], 0, 0.0006).rows
