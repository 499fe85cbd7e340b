"""Requests that follow one another on simulated devices: what the policy makes of them."""

from __future__ import annotations

import statistics
from functools import cache

import pytest

from outrider.policy.base import DraftMode
from outrider.policy.waiting import Waiting
from tests.support.simulators.in_process import InProcess
from tests.support.simulators.lock_step import LockStep
from tests.support.simulators.one_device import OneDevice
from tests.support.simulators.two_devices import PROMPT, TwoDevices


@cache
def rate_without(rows: int) -> float:
    return TwoDevices(rows, 0.0, speculate=False).rate(2.0, after=1.0)


def test_many_rows_draft_on_demand_and_few_ahead() -> None:
    """Branches for 64 rows come too late for half of them, and delay the drafts of the others."""
    world = TwoDevices(64, 0.0)
    assert world.rate(4.0, after=3.5) > 1.12 * rate_without(64)
    assert world.steps_on_demand > 0.5 * world.steps
    world.set_rows(2)  # 8 would be as fast on demand, within 5 %
    assert world.rate(4.0, after=2.0) > 2.2 * rate_without(2)
    assert world.steps_on_demand < 0.3 * world.steps, "the load has fallen"


def test_rows_wait_no_longer_than_their_next_drafts_at_hand_are_worth() -> None:
    """Sampled rows gain little by drafts, and greedy texts have them all within seconds."""
    world = TwoDevices(32, 1.0)
    assert world.rate(4.0, after=2.0) > 1.05 * rate_without(32)
    world.temperature = 0.0
    assert world.rate(2.0, after=2.5) > 1.12 * rate_without(32)


def test_a_single_request_drafts_ahead() -> None:
    world = TwoDevices(1, 0.0)
    assert world.rate(6.0) > 2.8 * rate_without(1)
    assert world.steps_on_demand < 0.03 * world.steps


@pytest.mark.parametrize("rows", [64, 128])
def test_trials_of_drafts_in_process_that_do_not_pay_are_short(rows: int) -> None:
    """Rates that were taken beside bursts of prompts made no drafts look slow."""
    without = InProcess(rows, 1.0, speculate=False).rate(4.0, after=2.0)
    assert InProcess(rows, 1.0).rate(4.0, after=2.0) > 0.98 * without


@pytest.mark.parametrize(
    "world", [InProcess(1, 0.0), TwoDevices(1, 0.0)], ids=["in process", "ahead"]
)
def test_drafts_made_between_steps_are_at_hand_and_not_free(world: TwoDevices) -> None:
    world.run(0.5)
    (row,) = world.engine._scheduler.by_session.values()
    assert row.drafting.measured.hit, "it was there"
    assert (row.drafting.measured.free_hits.mean > 0.5) != isinstance(world, InProcess)


def first_tokens_s(rows: int, *, speculate: bool) -> float:
    """Mean time to the first token of requests that come together, while one is there."""
    world = InProcess(1, 0.0, speculate=speculate)
    world.run(1.0)
    began, known = world.now, set(world.committed)
    world.set_rows(rows)
    waiting, times = set(world.committed) - known, []
    while waiting:
        world.step()
        begun = {session for session in waiting if len(world.committed[session]) > PROMPT}
        times += [world.now - began] * len(begun)
        waiting -= begun
    return statistics.fmean(times)


@pytest.mark.parametrize("rows", [8, 64, 128])
def test_first_tokens_of_a_burst_come_as_soon_as_without_drafts(rows: int) -> None:
    """The draft model's own way through the first prompts would delay all of them."""
    without = first_tokens_s(rows, speculate=False)
    assert first_tokens_s(rows, speculate=True) < 1.01 * without


def test_microbatches_are_faster_with_the_same_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 rows of which all draft on demand, beside newcomers' prompts."""
    halves, whole = (TwoDevices(64, 0.0, max_branches=0) for _ in range(2))
    rate = halves.rate(2.0, after=2.0)
    monkeypatch.setattr(Waiting, "in_halves", lambda *_: False)
    assert rate > 1.1 * whole.rate(2.0, after=2.0)
    both = halves.last.keys() & whole.last.keys()
    assert len(both) > 50
    assert all(halves.committed[i] == whole.committed[i] for i in both)


def test_halves_stay_where_their_own_delays_would_bring_them_together() -> None:
    """A draft for 16 rows takes less than one for 32."""
    world = TwoDevices(32, 1.0, max_branches=0)
    assert world.rate(4.0, after=2.0) > 1.02 * rate_without(32)


def test_many_rows_after_one_keep_their_drafts() -> None:
    """What one row's drafts took is too short a time to wait for those of 32."""
    world = TwoDevices(32, 0.0, max_branches=0)
    world.run(2.0)
    world.set_rows(1)
    world.run(3.5)
    world.set_rows(32)
    rate = world.rate(1.0)
    assert rate > 0.85 * world.rate(2.0, after=1.0)


@pytest.mark.parametrize(
    ("slow", "slow_s", "least"),
    [(0.0, 0.0, 1.75), (0.35, 0.003, 1.55), (0.2, 0.003, 1.6)],
    ids=["steady", "often slow", "slow at times"],
)
def test_rows_wait_for_drafts_that_take_longer_at_times(
    slow: float, slow_s: float, least: float
) -> None:
    """Waiting pays in all of it, on a device that drafts and steps share."""
    world = OneDevice(8, 0.0, slow=slow, slow_s=slow_s, seed=2)
    assert world.rate(4.0, after=3.0) > least * rate_without(8)
    stats = [commit.stats for commit in world.last.values() if commit.stats is not None]
    assert sum(s.fallback_rounds for s in stats) < 0.12 * sum(s.rounds for s in stats)


def test_rows_that_share_a_device_with_their_drafts_do_not_stay_in_two_cohorts() -> None:
    """Else few rows have steps of their own beside drafts for the others, and each is slow."""
    world = OneDevice(32, 0.0, seed=2, ragged=True)
    assert world.rate(2.0, after=2.0) > 1.35 * rate_without(32)


def test_a_trial_that_finds_two_cohorts_brings_them_together() -> None:
    """Their drafts are all slowed by each other's steps, and so none shows what waiting brings."""
    world = OneDevice(32, 0.0, slow=0.35, slow_s=0.003, seed=2)
    assert world.rate(2.0, after=2.0) > 1.2 * rate_without(32)


@pytest.mark.parametrize(("rows", "least"), [(1, 500), (8, 3600), (32, 9000)])
def test_proposer_keeps_pace_with_steps_of_all_rows(rows: int, least: float) -> None:
    """With a draft for each miss before the branches, half of all rounds missed."""
    world = LockStep(rows)
    world.rate(3.0)
    rate = world.rate(2.0)
    rounds = sum([stats.rounds for stats in world.stats])
    assert world.policy._modes.current.incumbent is DraftMode.AHEAD, "but for a trial"
    assert sum([stats.misses_late for stats in world.stats]) < 0.1 * rounds
    assert sum([stats.hits for stats in world.stats]) > 0.75 * rounds
    assert rate > least
