"""What is done before the next drafts are chosen, and what waits for the device to work again."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.types import StepEvents
from outrider.vllm.adapter import StepPlan
from tests.support.services.vllm_steps import VllmSteps


async def test_host_tells_of_a_miss_before_it_weighs_to_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps = VllmSteps(monkeypatch)
    proposer, order = steps.attach(), []
    steps.step()
    steps.post(proposer, steps.block("a"))  # "b" has none
    choose_rows, stepped = steps.host.tracker.choose_rows, steps.stepped

    def choosing(*args: Any) -> Any:
        order.append("weighed")
        return choose_rows(*args)

    def telling(events: StepEvents) -> None:
        order.extend(["told"] * bool(events.commits))
        stepped(events)

    monkeypatch.setattr(steps, "stepped", telling)
    steps.plugin.launched()
    monkeypatch.setattr(steps.host.tracker, "choose_rows", choosing)
    steps.step()
    assert order[order.index("told") + 1] == "weighed"


async def test_host_notes_each_round_once_after_what_came_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps = VllmSteps(monkeypatch)
    proposer, tracker = steps.attach(), steps.host.tracker
    noted: list[tuple[str, str]] = []
    rounds_done, blocks_arrived = tracker.rounds_done, tracker.blocks_arrived

    def done(rounds: Any, now: float) -> None:
        noted.extend((row.name, "round") for row, *_ in rounds)
        rounds_done(rounds, now)

    def arrived(blocks: Any) -> None:
        noted.extend((row.name, "block") for row, *_ in blocks)
        blocks_arrived(blocks)

    monkeypatch.setattr(tracker, "rounds_done", done)
    monkeypatch.setattr(tracker, "blocks_arrived", arrived)
    steps.step()
    for i in range(6):
        drafted = ("a", "b") if i % 3 == 2 else ("ab"[i % 2],)
        steps.post(proposer, *(steps.block(name, 8 if i % 2 else 2) for name in drafted))
        steps.step()
    steps.plugin.launched()
    for name in ("a", "b"):
        mine = [what for row, what in noted if row == name]
        assert mine.count("round") == 7
        assert mine.count("block") == 4
        assert "block block" not in " ".join(mine)  # one came before each step
        stats = steps.host.take_stats(name)
        assert stats is not None
        assert stats.hits + stats.misses_late + stats.misses_wrong <= 7


async def test_host_takes_offers_while_the_device_works(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = VllmSteps(monkeypatch)
    steps.step()
    steps.attach()
    rows = steps.host._rows.values()
    assert [row.drafting.proposer_id for row in rows] == [None, None]
    steps.plugin.launched()
    assert [row.drafting.proposer_id for row in rows] == ["p", "p"]


async def test_step_is_noted_as_of_its_launch_and_drafts_are_taken_before_its_result(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps = VllmSteps(monkeypatch, names=("a",))
    proposer = steps.attach()
    steps.step()
    steps.plugin.begin(StepPlan([], [], {}, {"a": 1}), 7.0)
    assert steps.host._accounting.step.began == 7.0
    steps.post(proposer, steps.block("a"))
    assert steps.host._rows["a"].draft is None
    steps.plugin.awaited()
    assert steps.host._rows["a"].draft is not None
