"""Bound the completions that run at once and their time, and drain them at the end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterator

from gateway.metrics import GatewayMetrics
from gateway.workers.shared import IN_FLIGHT, SharedCounts
from outrider.errors import CapacityError, DeadlineError, UnavailableError

_TIMER_S = 0.01  # by which a timer may go off early


class Admission:
    """Places for completions, their deadlines, and draining."""

    def __init__(
        self, max_in_flight: int, metrics: GatewayMetrics, shared: SharedCounts | None = None
    ) -> None:
        """Count with the completions of other workers, if any are `shared`."""
        self.max_in_flight = max_in_flight
        self._metrics = metrics
        self._shared = shared
        metrics.limit.set(max_in_flight)
        self._in_flight = 0
        self._running: set[asyncio.Timeout] = set()
        self._grace_end: float | None = None  # loop time, while draining

    @property
    def in_flight(self) -> int:
        return self._in_flight

    @property
    def in_flight_everywhere(self) -> int:
        """Return the completions of this process and of the other workers."""
        return self._in_flight + (0 if self._shared is None else self._shared.elsewhere(IN_FLIGHT))

    @property
    def draining(self) -> bool:
        return self._grace_end is not None

    @contextlib.contextmanager
    def admitted(self, completions: int) -> Iterator[None]:
        """Hold places for a number of completions, from before their prompts are worked on.

        Raises `CapacityError`, or `UnavailableError` while draining.
        """
        if self.draining:
            raise UnavailableError("This gateway is shutting down. Try another.")
        self._set_in_flight(self._in_flight + completions)
        try:
            # Told before it is compared: two workers that take the last place at the same time
            # both see too many, and never both too few.
            if self.in_flight_everywhere > self.max_in_flight:
                self._metrics.refused.inc()
                raise CapacityError("Too many requests are under way. Try again soon.")
            yield
        finally:
            self._set_in_flight(self._in_flight - completions)

    @contextlib.asynccontextmanager
    async def until(self, deadline: float) -> AsyncGenerator[None, None]:
        """End the body at the deadline (loop time), even if a client does not read.

        Raises `DeadlineError`, or `UnavailableError` while draining.
        """
        end = deadline if self._grace_end is None else min(deadline, self._grace_end)
        try:
            async with asyncio.timeout_at(end) as timeout:
                self._running.add(timeout)
                try:
                    yield
                finally:
                    self._running.discard(timeout)
        except TimeoutError as error:
            if self.draining:
                raise UnavailableError("This gateway is shutting down. Try again.") from error
            raise DeadlineError(
                "The request took too long. What was streamed so far is valid."
            ) from error

    def cancelled_by(self, deadline: float) -> str:
        """Return the outcome of a completion cancelled now: by this gateway or by the client."""
        now = deadline_after(_TIMER_S)
        if self._grace_end is not None and now >= min(deadline, self._grace_end):
            return UnavailableError.reason
        return DeadlineError.reason if now >= deadline else "cancelled"

    def drain(self, grace_s: float) -> None:
        """No new requests from now on; those under way have `grace_s` seconds to end."""
        self._grace_end = end = deadline_after(grace_s)
        for timeout in self._running:
            deadline = timeout.when()
            if not timeout.expired():  # its body is being ended already
                timeout.reschedule(end if deadline is None else min(deadline, end))

    def _set_in_flight(self, number: int) -> None:
        self._in_flight = number
        if self._shared is not None:
            self._shared.tell(IN_FLIGHT, number)
        self._metrics.in_flight.set(number)


def deadline_after(timeout_s: float) -> float:
    """Loop time `timeout_s` from now."""
    return asyncio.get_running_loop().time() + timeout_s
