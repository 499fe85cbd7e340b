"""A closed loop of requests that the scorer's own process drafts for, between its steps.

The proposer is the real one; its forwards take the simulated device's time.
"""

from __future__ import annotations

from typing import Any

from outrider.draft_port import DraftOffer
from outrider.drafting.proposer import SessionStart
from outrider.types import Request
from scorer_service.drafting.in_process import InProcessProposer
from tests.support.simulators.simulation import Method, Net, Player
from tests.support.simulators.two_devices import HOST_S, PROMPT, K, TwoDevices, verify_s


class InProcess(TwoDevices):
    """Steps take what their tokens take. Without drafts the next step is launched ahead."""

    max_num_batched_tokens, prefill_budget = 2048, 4096

    def __init__(self, rows: int, temperature: float, **options: Any) -> None:
        super().__init__(rows, temperature, max_branches=0, ragged=True, **options)
        step_s = self.step_s
        self.step_s = lambda step: step_s(step) - self._hidden_s

    def add(self, method: Method, net: Net, *, own_device: bool = False) -> Player:
        self._here = InProcessProposer(lambda: (method[0], ""), "here", method[1])
        self._here.build()
        self._here.listen(self)
        for n in (1, 8, 16, 32, 64, 128, 256):  # as a start measures them
            for k in range(K + 1):
                self.policy.measured.steps.observe_step(n, n * (1 + k), verify_s(n, k))
        return super().add(method, net, own_device=own_device)

    def _attach(self, player: Player) -> None:
        """It needs no stream."""

    def begin(self, request: Request) -> None:
        super().begin(request)
        if not self._speculate:
            return
        engine, session, asked = self.engine, request.session_id, self.drafting
        most = PROMPT + request.stop.max_tokens
        start = SessionStart((), request.sampling, K * asked, max_len=most)

        def attach() -> None:
            engine.set_drafting(session, DraftOffer("here", K, colocated=True, requested=asked))
            self._here.open(engine, session, 1, start, PROMPT)

        self._command(attach)

    def first_draft(self, *_: int) -> None:
        pass

    def lost(self, *_: int) -> None:
        raise AssertionError

    failed = lost

    def _carry_out(self) -> None:
        super()._carry_out()
        clock = self.players[0].clock
        clock.now = self.now
        self._here.draft_between_steps(self.engine)
        self._hidden_s = HOST_S * (self.now == clock.now)  # by the step before
        self.now = clock.now

    def _finalize(self, wake_at: float) -> None:
        super()._finalize(self.now + 1e-5 if self._here.busy else wake_at)
