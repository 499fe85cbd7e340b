"""A closed loop of requests whose draft and target share one simulated device by slices of time.

While a step and a draft are both under way each goes on at half its speed; so two processes share
a GPU. Their Python is reckoned with what the device does.
"""

from __future__ import annotations

from collections.abc import Callable

from outrider.drafting.proposer import DraftRound
from tests.support.simulators.simulation import Player
from tests.support.simulators.two_devices import TwoDevices


class OneDevice(TwoDevices):
    """Drafts on demand. Of them the share `slow` takes `slow_s` longer, as on a busy host."""

    def __init__(
        self, rows: int, temperature: float, *, slow: float = 0.0, slow_s: float = 0.0, seed: int
    ) -> None:
        self._slow, self._slow_s = slow, slow_s
        self._left = {"step": 0.0, "draft": 0.0}  # seconds that each would still take alone
        self._reckoned_at = self._step_ends = 0.0
        self._num_drafts = 0
        super().__init__(rows, temperature, max_branches=0, own_device=False, seed=seed)

    def at(self, when: float, what: Callable[[], None]) -> None:
        if self.players and when == self.players[0].busy_until > self.now:
            draft, at_end = self._num_drafts, what

            def what() -> None:  # unless a step has made it later since
                player = self.players[0]
                if draft == self._num_drafts and self.now < player.busy_until:
                    super(OneDevice, self).at(player.busy_until, what)
                else:
                    at_end()

        super().at(when, what)

    def _timed(self, player: Player, work: Callable[[], DraftRound]) -> DraftRound:
        def slowly() -> DraftRound:
            done = work()
            if self._slow and self.rng.random() < self._slow:
                player.clock.now += self._slow_s
            return done

        self._num_drafts += 1
        done = super()._timed(player, slowly)
        self._begin("draft", player.busy_until - self.now)
        return done

    def _work(self) -> None:
        idle = not self._in_flight
        super()._work()
        if idle and self._in_flight:
            self._begin("step", self._seconds())

    def _collect(self) -> None:
        if self.now < self._step_ends:
            super().at(self._step_ends, self._collect)
        else:
            super()._collect()

    def _begin(self, what: str, seconds: float) -> None:
        self._reckon()
        self._left[what] = seconds
        shorter, longer = sorted(self._left.values())
        player = self.players[0]
        for each, left in self._left.items():
            end = self.now + (2 * shorter if left == shorter else shorter + longer)
            if left and each == "step":
                self._step_ends = end
            elif left:
                player.busy_until = end

    def _reckon(self) -> None:
        passed, self._reckoned_at = self.now - self._reckoned_at, self.now
        while active := [what for what, left in self._left.items() if left > 0.0]:
            least = min(self._left[what] for what in active)
            part = min(passed, least * len(active))
            for what in active:
                left = self._left[what] - part / len(active)
                self._left[what] = left if left > 1e-9 else 0.0
            passed -= part
            if passed < 1e-9:
                break
