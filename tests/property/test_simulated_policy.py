"""Requests that follow one another on simulated devices: what the policy makes of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest

from outrider.policy.waiting import Waiting
from tests.support.simulators.devices import PROMPT, InProcess, OneDevice, TwoDevices

OFTEN, AT_TIMES = ({"slow": slow, "slow_s": 0.003} for slow in (0.35, 0.2))


@cache
def rate_without(rows: int, world: type[TwoDevices] = TwoDevices) -> float:
    return world(rows, 0.0, speculate=False).rate(2.0, after=1.0)


def test_greedy_texts_after_sampled_ones_have_drafts_within_seconds() -> None:
    world = TwoDevices(32, 1.0)
    assert world.rate(4.0, after=2.0) > 1.05 * rate_without(32), "no longer than waiting is worth"
    world.temperature = 0.0
    assert world.rate(2.0, after=2.5) > 1.12 * rate_without(32)


# Worlds, and how many times the tokens of no drafts they have after so many seconds.
WORTH: dict[str, tuple[Callable[[], TwoDevices], float, float]] = {
    "one row, ahead": (lambda: TwoDevices(1, 0.0), 0.0, 2.8),
    "8 rows together, ahead": (lambda: TwoDevices(8, 0.0), 2.0, 2.6),
    "32 rows together, ahead": (lambda: TwoDevices(32, 0.0), 2.0, 1.75),
    "64 rows together, ahead": (lambda: TwoDevices(64, 0.0), 3.5, 1.4),
    "in process, where no draft is free": (lambda: InProcess(8, 1.0), 2.0, 1.24),
    "64 rows in process, after short trials": (lambda: InProcess(64, 1.0), 2.0, 0.98),
    "128 rows in process, after short trials": (lambda: InProcess(128, 1.0), 2.0, 0.98),
    "halves stay": (lambda: TwoDevices(32, 1.0, max_branches=0), 2.0, 1.02),
    "one cohort": (lambda: OneDevice(32, 0.0, seed=2, ragged=True), 2.0, 1.35),
    "two joined": (lambda: OneDevice(32, 0.0, seed=2, **OFTEN), 2.0, 1.27),
    "a shared device": (lambda: OneDevice(8, 0.0, seed=2), 3.0, 1.75),
    "often slow": (lambda: OneDevice(8, 0.0, seed=2, **OFTEN), 3.0, 1.55),
    "slow at times": (lambda: OneDevice(8, 0.0, seed=2, **AT_TIMES), 3.0, 1.6),
}


@pytest.mark.parametrize(("world", "after_s", "worth"), WORTH.values(), ids=WORTH)
def test_drafts_are_worth_it(world: Callable[[], TwoDevices], after_s: float, worth: float) -> None:
    """Halves would come together by their own delays: a draft for 16 rows takes less than for 32.

    On a shared device two cohorts stay apart, each slowed by drafts for the other, if none is
    awaited. Waiting pays in all of it, also for drafts that take longer at times. In one process
    rates that were taken beside bursts of prompts made no drafts look slow.
    """
    played = world()
    assert played.rate(4.0, after=after_s) > worth * rate_without(played.num_rows, type(played))
    stats = [commit.stats for commit in played.last.values() if commit.stats is not None]
    undrafted = sum(s.fallback_rounds for s in stats) / sum(s.rounds for s in stats)
    assert undrafted < 0.12 or not isinstance(played, OneDevice) or played.num_rows > 8


def test_drafts_from_far_away_cost_nothing_and_are_used_once_they_come_soon() -> None:
    """They come two dozen rounds late: to wait for them, also for first ones, is in vain."""
    world = TwoDevices(8, 0.0, max_branches=0)
    [proposer] = world.players
    near, proposer.net = proposer.net, replace(proposer.net, delay_s=0.06)
    assert world.rate(2.0, after=1.0) > 0.99 * rate_without(8)
    proposer.net = near
    assert world.rate(1.0, after=1.0) > 1.7 * rate_without(8)


def first_tokens_s(rows: int, *, speculate: bool) -> float:
    """Sum of the times to the first tokens of requests that come while one is there."""
    total_s = 0.0
    for part in range(6):  # of a round, in which they come
        world = InProcess(1, 0.0, speculate=speculate)
        world.run(1.0 + 0.0015 * part)
        known = len(world.committed)
        world.set_rows(rows)
        new = list(world.committed.values())[known:]
        while waiting := [text for text in new if len(text) == PROMPT]:
            before = world.now
            world.step()
            total_s += (world.now - before) * len(waiting)
    return total_s


@pytest.mark.parametrize("rows", [8, 64, 128])
def test_first_tokens_of_a_burst_come_as_soon_as_without_drafts(rows: int) -> None:
    """The draft model's own way through the first prompts would delay all of them."""
    assert first_tokens_s(rows, speculate=True) < 1.01 * first_tokens_s(rows, speculate=False)


def test_microbatches_are_faster_with_the_same_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 rows of which all draft on demand, beside newcomers' prompts."""
    halves, whole = (TwoDevices(64, 0.0, max_branches=0) for _ in range(2))
    rate = halves.rate(2.0, after=2.0)
    monkeypatch.setattr(Waiting, "in_halves", lambda *_: False)
    assert rate > 1.1 * whole.rate(2.0, after=2.0)
    both = halves.last.keys() & whole.last.keys()
    assert len(both) > 50
    assert all(halves.committed[i] == whole.committed[i] for i in both)


def test_many_rows_after_one_keep_their_drafts() -> None:
    """What one row's drafts took is too short a time to wait for those of 32."""
    world = TwoDevices(32, 0.0, max_branches=0)
    for rows, until in ((1, 2.0), (32, 3.5)):
        world.run(until)
        world.set_rows(rows)
    assert world.rate(1.0) > 0.85 * world.rate(2.0, after=1.0)
