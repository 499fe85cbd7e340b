"""A closed loop of requests that the scorer's own process drafts for, between its steps.

The proposer that drafts there is the real one; its forwards take the simulated device's time.
"""

from __future__ import annotations

from outrider.draft_port import DraftOffer
from outrider.drafting.proposer import SessionStart
from outrider.policy.base import Policy
from scorer_service.drafting.in_process import InProcessProposer
from tests.support.simulators.two_devices import K, PROMPT, TwoDevices, verify_s


class InProcess(TwoDevices):
    """Steps take what their tokens take. Without drafts the next step is launched ahead."""

    def __init__(
        self,
        rows: int,
        temperature: float,
        *,
        speculate: bool = True,
        seed: int = 1,
        policy: Policy | None = None,
    ) -> None:
        self._here: InProcessProposer | None = None
        super().__init__(
            rows,
            temperature,
            speculate=speculate,
            max_branches=0,
            own_device=False,
            seed=seed,
            policy=policy,
            ragged=True,
            prefill_budget=4096,
            max_num_batched_tokens=2048,
        )
        for n in (1, 8, 16, 32, 64, 128, 256):  # as a start measures them
            for k in (0, 1, 2, 4):
                self.policy.measured.costs.observe_step(n, n * (1 + k), verify_s(n, k))
        (player,) = self.players
        self.players.clear()
        self._clock = player.clock
        self._here = InProcessProposer(
            lambda: (player.method, ""), "here", clock=lambda: player.clock.now
        )
        self._here.build()
        self._here.listen(self)
        for session in [*self.requests]:
            self._attach(session)

    def submit(self, request):  # type: ignore[no-untyped-def]
        super().submit(request)
        if self._here is not None:
            self._attach(request.session_id)

    def _open(self, player, session: int) -> None:  # type: ignore[no-untyped-def]
        pass  # see `_attach`

    def _attach(self, session: int) -> None:
        if not self._speculate:
            return
        running = len(self.engine._scheduler.by_session)
        drafting = running.bit_length() not in self.engine.snapshot().undrafted_sizes
        request = self.requests[session]
        k = K if drafting else 0
        start = SessionStart((), request.sampling, k, max_len=PROMPT + request.stop.max_tokens)
        here = self._here
        assert here is not None

        def attach() -> None:
            offer = DraftOffer("here", K, colocated=True, requested=drafting)
            self.engine.set_drafting(session, offer)
            here.open(self.engine, session, 1, start, PROMPT)

        self._command(attach)

    def first_draft(self, session_id: int, epoch: int) -> None: ...

    def lost(self, session_id: int, epoch: int) -> None:
        raise AssertionError

    def failed(self) -> None:
        raise AssertionError

    def _work(self) -> None:
        here = self._here
        if self._in_flight:
            return
        self.engine.collect()
        for command in self._commands:
            command()
        self._commands.clear()
        drafted = False
        if here is not None:
            self._clock.now = self.now
            here.draft_between_steps(self.engine)
            drafted = self._clock.now > self.now
            self.now = self._clock.now
        if self.engine.launch():
            flight = self.engine._in_flight
            assert flight is not None
            self._in_flight = True
            self.rows_per_step.append(len(flight.step.rows))
            seconds = self._seconds() if drafted else self._seconds() - 0.35e-3
            self.at(self.now + seconds, self._collect)
        events = self.engine.finalize_step()
        if not self._in_flight:
            wake = self.now + 1e-5 if here is not None and here.busy else self.engine.wake_at
            if wake < float("inf"):
                self.at(max(self.now, wake), self._work)
        if events is not None:
            assert not events.failures
            if events.timings is not None:
                self._publish(events)
