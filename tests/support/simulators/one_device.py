"""A closed loop of requests whose draft and target share one simulated device by slices of time.

While a step and a draft are both under way each goes on at half its speed; so two processes share
a GPU. Their Python is reckoned with what the device does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from tests.support.simulators.two_devices import NET, TwoDevices


@dataclass
class _Work:
    left_s: float  # that it would still take alone
    then: Callable[[], None]


class OneDevice(TwoDevices):
    """Drafts on demand. Of them the share `slow` takes `slow_s` longer, as on a busy host."""

    def __init__(
        self, rows: int, temperature: float, *, slow: float = 0, slow_s: float = 0, **options: Any
    ) -> None:
        self._under_way: list[_Work] = []
        self._shared_at = 0.0
        self.net = replace(NET, slow_chance=slow, slow_s=slow_s)
        super().__init__(rows, temperature, max_branches=0, own_device=False, **options)

    def _takes(self, seconds: float, then: Callable[[], None]) -> None:
        self._share()
        self._under_way = [*self._under_way, _Work(seconds, then)]
        self._await_next()

    def _share(self) -> None:
        """Let all that is under way go on until now."""
        passed_s, self._shared_at = self.now - self._shared_at, self.now
        for work in self._under_way:
            work.left_s -= passed_s / len(self._under_way)

    def _await_next(self) -> None:
        if under_way := self._under_way:
            work = min(under_way, key=lambda work: work.left_s)
            self.at(self.now + work.left_s * len(under_way), partial(self._end, work, under_way))

    def _end(self, work: _Work, under_way: list[_Work]) -> None:
        if under_way is self._under_way:  # else it has become later since
            self._share()
            self._under_way = [other for other in under_way if other is not work]
            self._await_next()
            work.then()
