"""outrider/process/watchdog.py: what hangs and what does not."""

from __future__ import annotations

import asyncio
import threading

import pytest

from outrider.process import watchdog
from outrider.process.watchdog import Watchdog


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "PATIENCE_S", 0.1)


def new() -> Watchdog:
    return Watchdog(threading.current_thread())


async def hangs(dog: Watchdog) -> bool:
    """Whether that is found within several times the patience."""
    try:
        async with asyncio.timeout(0.5):
            await dog.until_hung()
    except TimeoutError:
        return False
    return True


async def test_watchdog_with_endless_work_reports_a_hang(caplog: pytest.LogCaptureFixture) -> None:
    end = threading.Event()

    def wait_in_vain() -> None:
        dog.work()
        assert end.wait(60)

    thread = threading.Thread(target=wait_in_vain, name="computing")
    dog = Watchdog(thread)
    thread.start()
    async with asyncio.timeout(20):
        await dog.until_hung()
    end.set()
    thread.join()
    assert "the computing thread hangs" in caplog.text
    assert "in wait_in_vain" in caplog.text, "where"


async def test_watchdog_with_ending_work_reports_nothing() -> None:
    dog = new()

    async def work() -> None:
        while True:
            dog.work()
            await asyncio.sleep(0.01)

    working = asyncio.create_task(work())
    assert not await hangs(dog)
    working.cancel()


async def test_watchdog_while_idle_reports_nothing() -> None:
    dog = new()
    assert not await hangs(dog)
    dog.work()
    dog.idle()
    assert not await hangs(dog)
