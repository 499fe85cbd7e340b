"""Which turns the benchmark of telemetry compares."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.processes import ProcessError
from benchmarks.telemetry_cost import Turn, Work, pairs

WORK = Work(requests=2, tokens=128, rounds=40, drafted=160, accepted=88, steps=42)
NEAR = Work(requests=2, tokens=128, rounds=40, drafted=161, accepted=88, steps=42)
OTHER = Work(requests=2, tokens=128, rounds=41, drafted=164, accepted=87, steps=43)


def turns(*modes: str, other: int | None = None) -> list[Turn]:
    """Each takes a second longer than the one before, and half of its time is CPU time, of which a
    tenth is not the models'."""
    return [
        Turn(mode, OTHER if i == other else WORK, 10.0 + i, (10.0 + i) / 2, (10.0 + i) / 20)
        for i, mode in enumerate(modes)
    ]


SERIES = ("muted", "default", "muted", "all", "muted", "default", "muted", "all", "muted")


def test_a_steady_drift_costs_nothing() -> None:
    found = pairs(turns(*SERIES))
    assert [pair.turn.mode for pair in found] == ["default", "all"] * 2 + ["muted"] * 3
    assert [pair.lost for pair in found] == [0.0] * len(found)
    assert [pair.more for pair in found] == pytest.approx([0.0] * len(found))


def test_what_a_turn_takes_longer_than_its_neighbours_is_its_cost() -> None:
    series = turns(*SERIES)
    series[3] = Turn("all", WORK, 13.0 / 0.8, 7.0, (13.0 / 10 + 13.0 * 0.1) / 2)
    (pair, _) = [pair for pair in pairs(series) if pair.turn.mode == "all"]
    assert (pair.lost, pair.more) == pytest.approx((20.0, 10.0))


def test_a_turn_that_did_other_work_is_compared_with_nothing() -> None:
    found = pairs(turns(*SERIES, other=2))
    assert [pair.turn.seconds - 10 for pair in found] == [5, 7, 6]


def test_drafts_may_differ_a_little() -> None:
    series = turns(*SERIES)
    series[2] = Turn("muted", NEAR, 12.0, 6.0, 0.6)
    assert len(pairs(series)) == len(pairs(turns(*SERIES)))


def test_what_cannot_be_compared_is_refused() -> None:
    with pytest.raises(ProcessError, match="more --seconds"):
        pairs(turns("muted", "all", "muted"))
    series = turns(*SERIES)
    other = [replace(turn, work=OTHER) if i % 2 else turn for i, turn in enumerate(series)]
    with pytest.raises(ProcessError, match="only 5 of 9 turns did the same work"):
        pairs(other)
