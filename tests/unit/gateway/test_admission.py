"""Places, deadlines and draining of the gateway's completions."""

from __future__ import annotations

import asyncio

import pytest
from prometheus_client import CollectorRegistry

from gateway.admission import Admission, deadline_after
from gateway.metrics import GatewayMetrics
from outrider.errors import DeadlineError, UnavailableError

BOUND_S = 10.0


@pytest.fixture
def admission() -> Admission:
    return Admission(4, GatewayMetrics(CollectorRegistry()))


async def test_admission_when_draining_shortens_deadlines(admission: Admission) -> None:
    ending, may_end = asyncio.Event(), asyncio.Event()

    async def late() -> None:
        async with admission.until(deadline_after(0.0)):
            try:
                await asyncio.sleep(BOUND_S)
            finally:
                ending.set()
                await may_end.wait()  # as the scorer's call is cancelled

    async def early() -> None:
        async with admission.until(deadline_after(BOUND_S)):
            await asyncio.sleep(BOUND_S)

    requests = [asyncio.create_task(late()), asyncio.create_task(early())]
    async with asyncio.timeout(BOUND_S / 2):
        await ending.wait()
        admission.drain(0.0)
        may_end.set()
        outcomes = await asyncio.gather(*requests, return_exceptions=True)
    assert all(isinstance(outcome, UnavailableError) for outcome in outcomes)


async def test_admission_begun_while_draining_ends_with_the_grace(admission: Admission) -> None:
    admission.drain(0.0)
    with pytest.raises(UnavailableError):
        async with asyncio.timeout(BOUND_S / 2), admission.until(deadline_after(BOUND_S)):
            await asyncio.sleep(BOUND_S)


async def test_admission_past_deadline_raises_deadline_error(admission: Admission) -> None:
    with pytest.raises(DeadlineError):
        async with asyncio.timeout(BOUND_S), admission.until(deadline_after(0.0)):
            await asyncio.sleep(BOUND_S)
