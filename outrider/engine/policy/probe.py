"""When rows that draft less than they may try more for a round: what was measured grows old.

All rows of a proposer do so in the same step. Beside the steps of rows that do not try, a draft
takes longer where both share a device, and would say for ever that waiting for it does not pay.
"""

from __future__ import annotations

PROBE_EVERY = 16  # steps in which no row drafted the most it may
PROBE_STEPS = 4  # that a probe lasts at most: a row that does not wait has its draft a step later


class Probe:
    """A proposer's: whether its rows are to try more now."""

    def __init__(self) -> None:
        self._short_steps = 0
        self._last_step = -1

    @property
    def on(self) -> bool:
        return self._short_steps >= PROBE_EVERY

    def observe(self, step: int, *, most: bool, drafted: bool) -> None:
        """A row's round in this step was to draft the most it may, or tried to, and `drafted`."""
        if most and drafted:
            self._short_steps = 0
        elif step != self._last_step:
            over = self._short_steps + 1 >= PROBE_EVERY + PROBE_STEPS
            self._short_steps = 0 if over else self._short_steps + 1
        self._last_step = step
