"""A closed loop of requests that the scorer's own process drafts for, between its steps.

The proposer is the real one; its forwards take the simulated device's time.
"""

from __future__ import annotations

from outrider.draft_port import DraftOffer
from outrider.drafting.proposer import SessionStart
from outrider.types import Request
from scorer_service.drafting.in_process import InProcessProposer
from tests.support.simulators.simulation import Player
from tests.support.simulators.two_devices import HOST_S, PROMPT, K, TwoDevices, verify_s


class InProcess(TwoDevices):
    """Steps take what their tokens take. Without drafts the next step is launched ahead."""

    max_num_batched_tokens, prefill_budget = 2048, 4096

    def __init__(
        self, rows: int, temperature: float, *, speculate: bool = True, seed: int = 1
    ) -> None:
        self._here: InProcessProposer | None = None
        super().__init__(
            *(rows, temperature), speculate=speculate, max_branches=0, seed=seed, ragged=True
        )
        player = self.players.pop()
        self._draft_clock = player.clock
        self._here = InProcessProposer(lambda: (player.method, ""), "here", player.clock)
        self._here.build()
        self._here.listen(self)
        for n in (1, 8, 16, 32, 64, 128, 256):  # as a start measures them
            for k in range(K + 1):
                self.policy.measured.costs.observe_step(n, n * (1 + k), verify_s(n, k))
        for request in self.requests.values():
            self._attach(request)

    def submit(self, request: Request) -> None:
        super().submit(request)
        if self._here is not None:
            self._attach(request)

    def _open(self, player: Player, session: int) -> None:
        pass  # see `_attach`

    def _attach(self, request: Request) -> None:
        engine, here, session = self.engine, self._here, request.session_id
        running = len(engine._scheduler.by_session)
        asked = running.bit_length() not in engine.snapshot().undrafted_sizes
        most = PROMPT + request.stop.max_tokens
        start = SessionStart((), request.sampling, K * asked, max_len=most)

        def attach() -> None:
            assert here is not None
            engine.set_drafting(session, DraftOffer("here", K, colocated=True, requested=asked))
            here.open(engine, session, 1, start, PROMPT)

        if self._speculate:
            self._command(attach)

    def first_draft(self, *_: int) -> None:
        pass

    def lost(self, *_: int) -> None:
        raise AssertionError

    failed = lost

    def _work(self) -> None:
        if self._in_flight:
            return
        self.engine.collect()
        self._carry_out()
        host_s, busy = HOST_S, False  # hidden by the step before where nothing is drafted
        if self._here is not None:
            self._draft_clock.now = self.now
            self._here.draft_between_steps(self.engine)
            host_s = 0.0 if self.now < self._draft_clock.now else HOST_S
            self.now, busy = self._draft_clock.now, self._here.busy
        self._in_flight = self.engine.launch()
        if self._in_flight:
            self.at(self.now + self._seconds() - host_s, self._collect)
        self._finalize(self.now + 1e-5 if busy else self.engine.wake_at)
