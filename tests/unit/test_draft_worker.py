"""The drafting thread at its end."""

from __future__ import annotations

import asyncio
import threading

import pytest

from outrider.drafting.ngram import NgramProposer
from outrider.drafting.proposer import Proposer
from outrider.errors import DeadlineError
from outrider.rpc.telemetry import configure
from proposer_service.metrics import ProposerMetrics
from proposer_service.worker import DraftWorker


def test_a_thread_that_outlives_its_loop_ends_quietly(monkeypatch: pytest.MonkeyPatch) -> None:
    failed: list[object] = []
    monkeypatch.setattr(threading, "excepthook", failed.append)
    go_on = threading.Event()

    def build() -> tuple[Proposer, str]:
        go_on.wait(60)
        return NgramProposer(), ""

    async def give_up() -> threading.Thread:
        telemetry = configure("outrider-proposer")
        worker = DraftWorker(
            build, asyncio.get_running_loop(), ProposerMetrics(telemetry.registry), telemetry
        )
        with pytest.raises(DeadlineError):
            await worker.start(0.01)
        await worker.stop(0.01)
        return worker._thread

    thread = asyncio.run(give_up())
    go_on.set()
    thread.join(30)
    assert not thread.is_alive()
    assert not failed
