"""Requests that follow one another on simulated devices: what the policy makes of them."""

from __future__ import annotations

from functools import cache

import pytest

from outrider.policy.waiting import Waiting
from tests.support.simulators.in_process import InProcess
from tests.support.simulators.one_device import OneDevice
from tests.support.simulators.two_devices import PROMPT, TwoDevices


@cache
def rate_without(rows: int) -> float:
    world = TwoDevices(rows, 0.0, speculate=False)
    world.rate(1.0)
    return world.rate(2.0)


def test_many_rows_draft_on_demand_and_few_ahead() -> None:
    """Branches for 64 rows come too late for half of them, and delay the drafts of the others."""
    world = TwoDevices(64, 0.0)
    world.rate(3.5)
    rate = world.rate(4.0)
    assert world.steps_on_demand > 0.5 * world.steps
    assert rate > 1.12 * rate_without(64)
    world.set_rows(2)  # 8 would be as fast on demand, within 5 %
    world.rate(2.0)
    rate = world.rate(4.0)
    assert world.steps_on_demand < 0.3 * world.steps, "the load has fallen"
    assert rate > 2.2 * rate_without(2)


def test_drafts_that_do_not_pay_cost_little_and_greedy_texts_have_them_within_seconds() -> None:
    world = TwoDevices(32, 1.0)
    world.rate(2.0)
    assert world.rate(6.0) > 0.97 * rate_without(32)
    world.temperature = 0.0
    world.rate(2.5)
    assert world.rate(2.0) > 1.12 * rate_without(32)


def test_a_single_request_drafts_ahead() -> None:
    world = TwoDevices(1, 0.0)
    rate = world.rate(6.0)
    assert world.steps_on_demand < 0.03 * world.steps
    assert rate > 2.8 * rate_without(1)


@pytest.mark.parametrize("rows", [64, 128])
def test_trials_of_drafts_in_process_that_do_not_pay_are_short(rows: int) -> None:
    """Rates that were taken beside bursts of prompts made no drafts look slow."""
    plain, world = InProcess(rows, 1.0, speculate=False), InProcess(rows, 1.0)
    plain.run(2.0)
    world.run(2.0)
    assert world.rate(4.0) > 0.98 * plain.rate(4.0)


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
    return sum(times) / len(times)


@pytest.mark.parametrize("rows", [8, 64, 128])
def test_first_tokens_of_a_burst_come_as_soon_as_without_drafts(rows: int) -> None:
    """The draft model's own way through the first prompts would delay all of them."""
    without = first_tokens_s(rows, speculate=False)
    assert first_tokens_s(rows, speculate=True) < 1.01 * without


def test_microbatches_are_faster_with_the_same_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 rows of which all draft on demand, beside newcomers' prompts."""
    rates, texts = [], []
    for halves in (False, True):
        with monkeypatch.context() as patched:
            if not halves:
                patched.setattr(Waiting, "in_halves", lambda *_: False)
            world = TwoDevices(64, 0.0, max_branches=0)
            world.rate(2.0)
            rates.append(world.rate(2.0))
            texts.append({i: world.committed[i] for i in world.last})
    assert rates[1] > 1.1 * rates[0]
    assert len(texts[0]) > 50
    assert all(texts[1][i] == text for i, text in texts[0].items() if i in texts[1])


def test_halves_stay_where_their_own_delays_would_bring_them_together() -> None:
    """A draft for 16 rows takes less than one for 32."""
    world = TwoDevices(32, 1.0, max_branches=0)
    world.run(2.0)
    assert world.rate(4.0) > 1.02 * rate_without(32)


def test_many_rows_after_one_keep_their_drafts() -> None:
    """What one row's drafts took is too short a time to wait for those of 32."""
    world = TwoDevices(32, 0.0, max_branches=0)
    world.rate(2.0)
    world.set_rows(1)
    world.rate(1.5)
    world.set_rows(32)
    rate = world.rate(1.0)
    world.rate(1.0)
    assert rate > 0.85 * world.rate(2.0)


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
    world.run(3.0)
    assert world.rate(4.0) > least * rate_without(8)
    stats = [commit.stats for commit in world.last.values()]
    rounds = sum(s.rounds for s in stats if s is not None)
    undrafted = sum(s.fallback_rounds for s in stats if s is not None)
    assert undrafted < 0.12 * rounds


def test_a_trial_that_finds_two_cohorts_brings_them_together() -> None:
    """Their drafts are all slowed by each other's steps, and so none shows what waiting brings."""
    world = OneDevice(32, 0.0, slow=0.35, slow_s=0.003, seed=2)
    world.run(2.0)
    assert world.rate(2.0) > 1.2 * rate_without(32)
