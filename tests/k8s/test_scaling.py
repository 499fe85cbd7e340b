"""Autoscalers as the chart renders them, under load: a simulation in steps of a second.

Scorers take minutes to start and have room for a number of requests; the rest waits. The signals
are what the chart's queries sum; Kubernetes' own algorithm decides every 15 s.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.support.kubernetes import helm
from tests.support.kubernetes.autoscaler import PERIOD_S, Autoscaler, Keda

SETS = (
    "monitoring.serviceMonitor.enabled=true",
    "scorer.autoscaling.enabled=true",
    "scorer.flags.max-num-seqs=64",
    "proposers.draft.autoscaling.enabled=true",
)
ROOM = 64
TARGET = 48
START_S = 240
RECORDED = Path(__file__).with_name("recorded_load.csv")
"""By `tests/support/kubernetes/record_load.py`, of a scorer with room for so many:"""
ROOM_RECORDED = 4


def spec_of(name: str) -> dict[str, Any]:
    found: dict[str, Any] = helm.only(helm.render(*SETS), "HorizontalPodAutoscaler", name)["spec"]
    return found


@dataclass
class Fleet:
    """Scorers and their requests; `left` has the seconds that each running request still takes."""

    autoscaler: Autoscaler
    serving: int = 1
    starting: list[int] = field(default_factory=list)
    left: list[int] = field(default_factory=list)
    queue: list[int] = field(default_factory=list)
    history: list[int] = field(default_factory=list)

    def run(
        self, seconds: int, arrivals: Callable[[int], list[int]], *, stuck: bool = False
    ) -> None:
        """`arrivals` says the lengths of the requests that come in a second; stuck: none ends."""
        for _ in range(seconds):
            now = len(self.history)
            self.queue += arrivals(now)
            self.starting = [left - 1 for left in self.starting if left > 1] + [
                0 for left in self.starting if left == 1
            ]
            self.serving += self.starting.count(0)
            self.starting = [left for left in self.starting if left]
            if not stuck:
                self.left = [left - 1 for left in self.left if left > 1]
                free = max(0, self.serving * ROOM - len(self.left))
                self.left += self.queue[:free]
                self.queue = self.queue[free:]
            if now % PERIOD_S == 0:
                self._scale(now)
            self.history.append(self.autoscaler.replicas)

    def _scale(self, now: int) -> None:
        present = self.serving + len(self.starting)
        waiting, running = len(self.queue), len(self.left)
        kv = min(self.serving, running / ROOM)
        wanted = self.autoscaler.sync(
            now, {"requests": waiting + running, "open": waiting + running, "kv": kv}
        )
        for _ in range(wanted - present):
            self.starting.append(START_S)
        for _ in range(present - wanted):
            if self.starting:
                self.starting.pop()
            else:
                self.serving -= 1


@pytest.fixture
def fleet() -> Fleet:
    return Fleet(Autoscaler(spec_of("outrider-scorer"), 1))


def steady(per_second: float, length: int) -> Callable[[int], list[int]]:
    return lambda now: [length] * (int((now + 1) * per_second) - int(now * per_second))


def test_burst_of_half_a_minute_does_not_buy_the_maximum(fleet: Fleet) -> None:
    fleet.run(600, steady(1.0, 20))  # 20 at once: a scorer has room
    assert max(fleet.history) == 1
    fleet.run(30, steady(10.0, 20))
    fleet.run(1800, steady(1.0, 20))
    assert max(fleet.history) <= 5
    assert fleet.history[-1] == 1
    assert not fleet.queue


def test_long_answers_with_nobody_admitted_bring_scorers() -> None:
    """Queue time, which is observed at the first step, is 0 then."""
    fleet = Fleet(Autoscaler(spec_of("outrider-scorer"), 1))
    fleet.run(1, lambda _: [7200] * 500)
    fleet.run(900, lambda _: [])
    assert fleet.autoscaler.replicas == 8  # 500 / 48 are more than may be
    assert len(fleet.left) == 500
    assert not fleet.queue


def test_stuck_scorers_bring_more_and_no_more_than_the_load_asks_for(fleet: Fleet) -> None:
    fleet.run(900, steady(0.1, 60), stuck=True)
    assert len(fleet.queue) == 90
    assert fleet.history[-1] == 2  # 90 / 48
    assert sorted(fleet.history) == fleet.history


def test_saturation_ends_with_room_for_all_and_falls_when_it_is_over(fleet: Fleet) -> None:
    fleet.run(3600, steady(5.0, 50))  # 250 at once: 6 scorers at 48
    needed = 250 / TARGET
    assert needed <= fleet.history[-1] <= needed + 2
    assert not fleet.queue
    late = fleet.history[-1200:]
    assert max(late) - min(late) <= 1  # no swinging
    fleet.run(3600, steady(0.2, 50))
    assert fleet.history[-1] == 1


def test_growth_never_exceeds_what_demand_asks_for(fleet: Fleet) -> None:
    demand: list[float] = []

    def waves(now: int) -> list[int]:
        count = 6 if now // 600 % 2 else 1
        demand.append(len(fleet.left) + len(fleet.queue) + count)
        return [40] * count

    fleet.run(7200, waves)
    for end in range(0, 7200, PERIOD_S):
        most = max(demand[max(0, end - 1800) : end + 1])  # it falls one by one, after 600 s
        assert fleet.history[end] <= max(1, math.ceil(most / TARGET))


@pytest.mark.parametrize(
    ("utilisation", "late", "pods"),
    [
        (0.14, 0.5, 1),  # late on the way: more proposers change nothing
        (0.6, 0.02, 1),
        (0.6, 0.5, 2),  # late and busy
        (0.95, 0.0, 2),
    ],
)
def test_pool_grows_by_work_and_not_by_lateness_alone(
    utilisation: float, late: float, pods: int
) -> None:
    autoscaler = Autoscaler(spec_of("outrider-proposer-draft"), 1)
    work = utilisation * (1 + (late > 0.1))  # the query, which promtool tests
    for now in range(0, 3600, PERIOD_S):
        autoscaler.sync(now, {"work": work})
    assert autoscaler.replicas == pods


def recorded() -> list[dict[str, float]]:
    with RECORDED.open() as file:
        return [{k: float(v) for k, v in row.items()} for row in csv.DictReader(file)]


def test_recorded_load_of_one_scorer_asks_for_what_it_needs_and_falls_back() -> None:
    """Signals that a real scorer and gateway gave, with room for four requests."""
    rows = recorded()
    assert max(row["waiting"] for row in rows) > 2 * ROOM_RECORDED  # it was saturated
    assert all(row["running"] <= ROOM_RECORDED for row in rows)
    # Both signals say the same of it, but for what is on its way between the services.
    off = [abs(row["open"] - row["running"] - row["waiting"]) for row in rows]
    assert sum(off) / len(off) < 2
    sets = ("scorer.autoscaling.enabled=true", f"scorer.flags.max-num-seqs={ROOM_RECORDED}")
    manifests = helm.render("monitoring.serviceMonitor.enabled=true", *sets)
    spec = helm.only(manifests, "HorizontalPodAutoscaler", "outrider-scorer")["spec"]
    autoscaler, history = Autoscaler(spec, 1), []
    quiet = [dict.fromkeys(rows[0], 0.0)] * 2400
    for now, row in enumerate([*rows, *quiet]):
        if now % PERIOD_S == 0:
            requests = row["running"] + row["waiting"]
            signals = {"requests": requests, "open": row["open"], "kv": row["kv"]}
            autoscaler.sync(now, signals)
        history.append(autoscaler.replicas)
    demand = [max(row["running"] + row["waiting"], row["open"]) for row in rows]
    saturated = next(now for now, row in enumerate(rows) if row["waiting"] >= ROOM_RECORDED)
    assert history[saturated + 90] > 1  # not blind: within a window, a period and a minute
    assert max(history) <= math.ceil(max(demand) / (0.75 * ROOM_RECORDED))  # and no runaway
    assert max(history) <= 1 + 2 * len(rows) / 60  # two a minute
    assert history[-1] == 1


def test_scaling_with_missing_metrics_removes_nobody() -> None:
    autoscaler = Autoscaler(spec_of("outrider-scorer"), 4)
    for now in range(0, 3600, PERIOD_S):
        autoscaler.sync(now, {"requests": None, "open": 1, "kv": None})
    assert autoscaler.replicas == 4


def test_scorers_at_zero_come_with_held_requests_and_go_when_it_is_quiet() -> None:
    rendered = helm.render(values=helm.EXAMPLES / "scale-to-zero.yaml")
    spec = helm.only(rendered, "ScaledObject", "outrider-scorer")["spec"]
    keda = Keda(spec, ("requests", "open", "kv"))
    none: dict[str, float | None] = {"requests": None, "open": 0, "kv": None}  # nobody is scraped
    at_zero = [keda.poll(now, none) for now in range(0, 600, PERIOD_S)]
    assert set(at_zero) == {0}
    held = [keda.poll(now, none | {"open": 100}) for now in range(600, 1200, PERIOD_S)]
    assert (held[0], held[-1]) == (1, 3)  # 100 / 48, before a scorer serves
    cooldown_s = spec["cooldownPeriod"]
    quiet: dict[str, float | None] = {"requests": 0, "open": 0, "kv": 0}
    later = [keda.poll(now, quiet) for now in range(1200, 1200 + 2 * cooldown_s, PERIOD_S)]
    assert 0 not in later[: (cooldown_s - PERIOD_S) // PERIOD_S]
    assert later[-1] == 0
