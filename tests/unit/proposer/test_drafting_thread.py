"""The drafting thread at its end and in spare time, and what becomes of sessions that go on."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence

import pytest
from prometheus_client import CollectorRegistry

from outrider.drafting.copying.ngram import NgramProposer
from outrider.drafting.copying.suffix import SuffixProposer
from outrider.drafting.hybrid import HybridProposer
from outrider.drafting.proposer import DraftRound, Pace, Proposer, SessionKey
from outrider.errors import DeadlineError
from outrider.process import watchdog
from outrider.rpc.telemetry import configure
from outrider.v1 import draft_pb2
from proposer_service.cycle import Attach, Batch, Cycle, Detach, Item, SendMessage
from proposer_service.drafting_thread import DraftingThread
from proposer_service.metrics import ProposerMetrics
from tests.support.services.draft_scorer import close, commit, open_
from tests.support.simulators.methods import draft_model


def test_drafting_thread_that_outlives_its_loop_ends_quietly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failed: list[object] = []
    monkeypatch.setattr(threading, "excepthook", failed.append)
    go_on = threading.Event()

    def build() -> tuple[Proposer, str]:
        go_on.wait(60)
        return NgramProposer(), ""

    async def give_up() -> threading.Thread:
        telemetry = configure("outrider-proposer")
        thread = DraftingThread(
            build, asyncio.get_running_loop(), ProposerMetrics(telemetry.registry), telemetry
        )
        with pytest.raises(DeadlineError):
            await thread.start(0.01)
        await thread.stop(0.01)
        return thread._thread

    thread = asyncio.run(give_up())
    go_on.set()
    thread.join(30)
    assert not thread.is_alive()
    assert not failed


async def test_drafting_thread_that_drafts_ahead_for_long_does_not_hang(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watchdog, "PATIENCE_S", 0.1)
    began = threading.Event()

    def ahead(_: Cycle) -> bool:
        began.set()
        time.sleep(0.005)
        return True

    monkeypatch.setattr(Cycle, "ahead", ahead)
    telemetry = configure("outrider-proposer")
    metrics = ProposerMetrics(telemetry.registry)
    thread = DraftingThread(
        lambda: (NgramProposer(), ""), asyncio.get_running_loop(), metrics, telemetry
    )
    await thread.start(10)
    thread.put(SendMessage(1, draft_pb2.DraftRequest()))  # of no link: it only wakes the thread
    assert await asyncio.to_thread(began.wait, 10)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(thread.until_ended(), 0.5)
    await thread.stop(10)
    await thread.until_ended()


class Watched(NgramProposer):
    """It does not run ahead."""

    def __init__(self) -> None:
        super().__init__(max_branches=0)
        self.calls: list[list[SessionKey]] = []

    def ahead(self, sessions: Sequence[SessionKey], pace: Pace) -> DraftRound:
        self.calls.append(list(sessions))
        return super().ahead(sessions, pace)


def test_drafting_thread_gives_spare_time_to_any_method() -> None:
    alone, joined = Watched(), Watched()
    telemetry = configure("outrider-proposer")
    for method in (alone, HybridProposer([joined, SuffixProposer()])):
        cycle = Cycle(method, ProposerMetrics(CollectorRegistry()), telemetry)
        assert not cycle.ahead()
    assert alone.calls == joined.calls == [[]]


def test_drafting_thread_counts_the_rows_of_loops() -> None:
    method, clock = draft_model(max_branches=2)
    metrics = ProposerMetrics(registry := CollectorRegistry(), "a")
    cycle = Cycle(method, metrics, configure("outrider-proposer"), clock)
    batch = draft_pb2.SessionBatch(opens=[open_(1, [1, 2])], step_us=10_000)
    cycle.apply([attach(1), received(1, batch)])
    cycle.draft()
    assert cycle.ahead()
    found = {
        (sample.name.rpartition("_loop_")[2], *sample.labels.values()): sample.value
        for family in registry.collect()
        for sample in family.samples
        if "_loop_" in sample.name and "_created" not in sample.name and sample.value
    }
    assert found == {
        ("seconds_count", "a", "1", "4"): 1.0,
        ("seconds_sum", "a", "1", "4"): pytest.approx(4 * 0.0006),
        ("rows_total", "a", "1", "4", "draft"): 1.0,
        ("seconds_count", "a", "2", "3"): 1.0,
        ("seconds_sum", "a", "2", "3"): pytest.approx(3 * 0.0006),
        ("rows_total", "a", "2", "3", "branch"): 2.0,
    }


def test_drafting_thread_measures_its_time_beside_loops() -> None:
    method, clock = draft_model(max_branches=2)
    cycle = Cycle(
        method, ProposerMetrics(CollectorRegistry()), configure("outrider-proposer"), clock
    )

    def send(_: object) -> None:
        clock.now += 0.002

    batch = draft_pb2.SessionBatch(opens=[open_(1, [1, 2])], step_us=10_000)
    cycle.apply([Attach(1, send, 512), received(1, batch)])
    cycle.draft()
    assert cycle._pace().host_s == 0.0, "no branches"
    assert cycle.ahead()
    assert cycle._pace().host_s == pytest.approx(0.002)


def received(link: int, batch: draft_pb2.SessionBatch) -> Item:
    return Batch(link, batch, 0.0)


def attach(link: int) -> Item:
    return Attach(link, lambda _: None, 512)


ENDS: dict[str, tuple[Callable[[Cycle], object], int]] = {
    # and over which link the session then goes on
    "its stream went down": (lambda cycle: cycle.apply([Detach(1), attach(2)]), 2),
    "it is opened anew": (lambda _: None, 1),
    "drafting failed": (lambda cycle: cycle.give_up(), 1),
}


@pytest.mark.parametrize("what", ENDS)
def test_drafting_thread_remembers_a_continued_response_once_it_is_whole(what: str) -> None:
    end, link = ENDS[what]
    suffix = SuffixProposer()
    telemetry = configure("outrider-proposer")
    cycle = Cycle(suffix, ProposerMetrics(CollectorRegistry()), telemetry)
    opened, committed = open_(1, [1, 2]), commit(1, 2, [3, 4])
    cycle.apply(
        [attach(1), received(1, draft_pb2.SessionBatch(opens=[opened], commits=[committed]))]
    )
    end(cycle)
    again = open_(1, [1, 2, 3, 4], epoch=2)
    again.num_output_tokens = 2
    cycle.apply([received(link, draft_pb2.SessionBatch(opens=[again]))])
    assert (len(suffix.responses), suffix.num_sessions) == (0, 1)
    closing = draft_pb2.SessionBatch(
        commits=[commit(1, 4, [5], epoch=2)], closes=[close(1, epoch=2)]
    )
    cycle.apply([received(link, closing)])
    assert suffix.responses.num_tokens == 6, "with an end"
