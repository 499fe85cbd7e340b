"""What the workers of a gateway share: counts, places, metrics; and when their parent gives up."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from gateway import processes
from gateway.admission import Admission
from gateway.config import GatewayConfig
from gateway.metrics import GatewayMetrics
from gateway.processes import Worker, default_workers
from gateway.workers import supervisor
from gateway.workers import worker as worker_module
from gateway.workers.metrics import WorkerMetrics, retire
from gateway.workers.shared import IN_FLIGHT, SharedCounts
from gateway.workers.supervisor import Workers
from gateway.workers.worker import Membership
from outrider.errors import CapacityError
from outrider.rpc.exposition import encode
from tests.support.waiting import until


def worker(folder: Path, index: int, count: int = 2) -> Worker:
    return Worker(index, count, 1, folder)


def admission(folder: Path, index: int, most: int) -> Admission:
    counts = SharedCounts.of(worker(folder, index))
    return Admission(most, GatewayMetrics(CollectorRegistry()), counts)


def test_worker_written_and_parsed_is_the_same(tmp_path: Path) -> None:
    folder = tmp_path / "with:colon"
    assert Worker.parse(str(worker(folder, 1))) == worker(folder, 1)


def test_admission_of_two_workers_has_one_limit(tmp_path: Path) -> None:
    counts = SharedCounts.create(tmp_path, 2)
    one, other = (admission(tmp_path, index, 3) for index in (0, 1))
    with one.admitted(2):
        with other.admitted(1), pytest.raises(CapacityError), one.admitted(1):
            pass
        with pytest.raises(CapacityError), other.admitted(2):
            pass
        with other.admitted(1):
            assert counts.elsewhere(IN_FLIGHT) == 3
            assert one.in_flight_everywhere == other.in_flight_everywhere == 3
    assert (one.in_flight, other.in_flight, counts.elsewhere(IN_FLIGHT)) == (0, 0, 0)


def test_admission_of_a_worker_that_ended_has_its_places_back(tmp_path: Path) -> None:
    counts = SharedCounts.create(tmp_path, 2)
    one, other = (admission(tmp_path, index, 1) for index in (0, 1))
    dead = one.admitted(1)
    dead.__enter__()
    with pytest.raises(CapacityError), other.admitted(1):
        pass
    counts.clear(0)  # as the parent does
    with other.admitted(1):
        pass


class Page:
    """The metrics of one worker."""

    def __init__(self, folder: Path, index: int) -> None:
        own = CollectorRegistry()
        self.counter = Counter("outrider:c", "A counter.", ("of",), registry=own)
        self.gauge = Gauge("outrider:gateway_scorers_serving", "A gauge.", registry=own)
        self.in_flight = Gauge("outrider:gateway_requests_in_flight", "Added.", registry=own)
        self.histogram = Histogram("h_seconds", "Times.", buckets=(1.0, 2.0), registry=own)
        self.metrics = WorkerMetrics(own, worker(folder, index))
        self.shown = CollectorRegistry()
        self.shown.register(self.metrics)

    def value(self, name: str, **labels: str) -> float | None:
        return self.shown.get_sample_value(name, labels)


def test_metrics_of_two_workers_are_sums_whichever_is_asked(tmp_path: Path) -> None:
    pages = [Page(tmp_path, index) for index in (0, 1)]
    for page, number in zip(pages, (1, 2), strict=True):
        page.counter.labels("both").inc(number)
        page.counter.labels(f"only {number}").inc(number)
        page.gauge.set(number)
        page.in_flight.set(number)
        page.histogram.observe(number - 0.5, {"trace_id": f"{number}"})
        page.metrics.save()
    for page in pages:
        assert page.value("outrider:c_total", of="both") == 3
        assert page.value("outrider:c_total", of="only 1") == 1
        assert page.value("outrider:c_total", of="only 2") == 2
        assert page.value("outrider:gateway_scorers_serving") == 2
        assert page.value("outrider:gateway_requests_in_flight") == 3
        assert page.value("h_seconds_bucket", le="1.0") == 1
        assert page.value("h_seconds_bucket", le="+Inf") == 2
        assert page.value("h_seconds_sum") == 2.0
    text = encode(pages[0].shown, "application/openmetrics-text")[0].decode()
    assert 'h_seconds_bucket{le="1.0"} 1.0 # {trace_id="1"} 0.5' in text
    assert 'h_seconds_bucket{le="2.0"} 2.0 # {trace_id="2"} 1.5' in text


def test_metrics_of_a_worker_that_ended_are_not_lost_and_go_on(tmp_path: Path) -> None:
    one, other = (Page(tmp_path, index) for index in (0, 1))
    one.counter.labels("x").inc(5)
    one.in_flight.set(7)
    one.histogram.observe(0.5)
    one.metrics.save()
    retire(tmp_path, 0)
    assert other.value("outrider:c_total", of="x") == 5
    assert other.value("outrider:gateway_requests_in_flight") == 0
    for round_ in (1, 2):  # the next in its place counts what was there only once
        again = Page(tmp_path, 0)
        again.counter.labels("x").inc(2)
        again.histogram.observe(1.5)
        again.metrics.save()
        for page in (again, other):
            assert page.value("outrider:c_total", of="x") == 5 + 2 * round_
            assert page.value("h_seconds_count") == 1 + round_


def test_default_workers_follow_cores_and_the_containers_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = tmp_path / "cpu.max"
    monkeypatch.setattr(processes, "_CPU_MAX", limit)

    def workers(cores: int, cpu_max: str | None) -> int:
        monkeypatch.setattr(processes.os, "sched_getaffinity", lambda _: set(range(cores)))
        limit.unlink(missing_ok=True)
        if cpu_max is not None:
            limit.write_text(cpu_max)
        return default_workers()

    assert [workers(n, None) for n in (1, 2, 7, 8, 12, 16, 128)] == [1, 1, 1, 2, 3, 4, 4]
    assert workers(64, "max 100000\n") == 4
    assert workers(64, "200000 100000\n") == 1
    assert workers(64, "850000 100000\n") == 2


READY = "print('ready {}', flush=True); "


class Scripted(Workers):
    """Workers that run a script in place of a gateway."""

    script = ""

    def _spec(self, index: int) -> supervisor.ServiceSpec:
        return supervisor.ServiceSpec(f"worker {index}", (sys.executable, "-c", self.script))


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Scripted:
    monkeypatch.setattr(supervisor, "_BACKOFF_S", 0.01)
    monkeypatch.setattr(supervisor, "_LOOK_S", 0.05)
    return Scripted(GatewayConfig(scorers=("127.0.0.1:1",), workers=2), ())


async def test_workers_that_keep_ending_end_the_gateway(scripted: Scripted) -> None:
    scripted.script = READY + "raise SystemExit(3)"
    try:
        assert (await scripted.start())["workers"] == "2"
        await asyncio.wait_for(scripted.wait_failed(), 60)
    finally:
        await scripted.stop()


async def test_worker_without_a_beat_is_killed_and_started_again(
    scripted: Scripted, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(supervisor, "_HANGS_AFTER", 5)
    scripted.script = READY + "import time; time.sleep(60)"
    try:
        await scripted.start()
        before = {index: each.pid for index, each in scripted._processes.items()}
        await until(lambda: "worker 0 is back" in caplog.text, 60)
        assert "worker 0 hangs: it is killed" in caplog.text
        assert scripted._processes[0].pid != before[0]
    finally:
        await scripted.stop()


async def test_worker_that_no_process_can_be_made_for_is_tried_again(
    scripted: Scripted, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    scripted.script = READY + "import time; time.sleep(60)"
    make, left = asyncio.create_subprocess_exec, [2]

    async def fail(*args: Any, **kwargs: Any) -> Any:
        if left[0]:
            left[0] -= 1
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        return await make(*args, **kwargs)

    try:
        await scripted.start()
        monkeypatch.setattr(asyncio, "create_subprocess_exec", fail)
        os.kill(scripted._processes[0].pid, signal.SIGKILL)
        await until(lambda: "worker 0 is back" in caplog.text, 60)
        assert caplog.text.count("Cannot allocate memory") == 2
    finally:
        await scripted.stop()


async def test_worker_whose_metrics_cannot_be_written_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "_BEAT_S", 0.01)
    SharedCounts.create(tmp_path, 2)
    member = Membership(worker(tmp_path, 0), CollectorRegistry())
    (tmp_path / "metrics-0.new").symlink_to("/dev/full")
    telling = asyncio.create_task(member.tell(lambda: 0))
    await until(lambda: member.counts.beats(0) > 2)
    assert not telling.done()
    assert "No space left" in caplog.text
    telling.cancel()
    member.leave()
    retire(tmp_path, 0)
    assert list(member.shown.collect()) == []
