"""The way to the scorer and back, as commits show it."""

from __future__ import annotations

import pytest

from proposer_service.pace import PaceMeter


def test_pace_meter_takes_the_rest_of_the_shortest_round_for_network() -> None:
    meter = PaceMeter()
    for i, extra in enumerate((0.004, 0.0, 0.010, 0.002)):
        now = float(i)
        meter.handed_over(1, now)
        meter.step(0.005)
        meter.committed(1, now + 0.005 + 0.001 + extra, 0.005, verified=True)
    assert meter.pace.step_s == pytest.approx(0.005)
    assert 0.001 <= meter.pace.network_s < 0.002


def test_pace_meter_tells_the_time_since_the_last_commits() -> None:
    meter = PaceMeter()
    assert meter.after(7.0).spent_s == 0.0, "none came"
    meter.committed(1, 5.0, 0.005, verified=True)
    assert meter.after(5.003).spent_s == pytest.approx(0.003)


def test_pace_meter_when_draft_was_not_waited_for_measures_nothing() -> None:
    meter = PaceMeter()
    meter.committed(1, 5.0, 0.005, verified=True)  # its draft was at hand
    meter.handed_over(2, 1.0)
    meter.forget(2)
    meter.committed(2, 5.0, 0.005, verified=True)
    meter.handed_over(3, 1.0)
    meter.committed(3, 5.0, 0.0, verified=True)  # a scorer that does not say what its step took
    meter.handed_over(4, 1.0)
    meter.committed(4, 1.001, 0.005, verified=False)  # from a step that began before it came
    assert meter.pace.network_s == 0.0


def test_pace_meter_takes_branches_for_an_upper_bound() -> None:
    meter = PaceMeter()
    for i, late in enumerate((0.002, 0.0, 0.005)):  # they come so long before the commit, or late
        now = float(i)
        meter.handed_ahead(1, now)
        meter.committed(1, now + 0.001, 0.005, verified=True)  # the commit that they foretold
        meter.committed(1, now + 0.006 + late, 0.005, verified=True)
    assert 0.001 <= meter.pace.network_s < 0.00105


def test_pace_meter_forgets_a_wrong_measurement() -> None:
    """Such a one comes of a draft that the scorer did not verify."""
    meter = PaceMeter()
    for i in range(512):
        now = float(i)
        meter.handed_ahead(1, now)
        meter.committed(1, now + 0.001, 0.005, verified=True)
        took = 0.007 if i else 0.002
        meter.committed(1, now + took, 0.005, verified=True)
    assert meter.pace.network_s == pytest.approx(0.002, rel=0.15)


def test_pace_meter_when_step_went_without_branches_measures_nothing() -> None:
    meter = PaceMeter()
    meter.handed_ahead(1, 0.0)
    meter.committed(1, 0.001, 0.005, verified=True)
    meter.committed(1, 0.005, 0.005, verified=False)
    meter.committed(1, 0.02, 0.005, verified=True)
    assert meter.pace.network_s == 0.0


def test_pace_meter_when_no_branch_follows_forgets_a_slow_host() -> None:
    """The first branches may have compiled their code, and then nothing is drafted ahead."""
    meter = PaceMeter()
    meter.host(2.0)
    for _ in range(100):
        meter.no_branches()
    assert meter.pace.host_s == 0.0
    meter.host(0.001)
    assert meter.pace.host_s == pytest.approx(0.001)
