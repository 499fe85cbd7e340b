"""Notices that a thread hangs: in a call to a device that never returns, say, or a deadlock."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import traceback
from typing import Final

PATIENCE_S: Final = 300.0
"""How long one piece of work, such as a step, may take. Unless told otherwise, half of what a
gateway gives a request, which so has as long elsewhere, and half of what a start may take, in which
the largest pieces are done twice."""

_LOOKS: Final = 100  # within that
_log = logging.getLogger(__name__)


class Watchdog:
    """`thread` tells when it works; the event loop looks whether it gets on."""

    def __init__(self, thread: threading.Thread) -> None:
        self._thread = thread
        # Written by the thread alone:
        self._begun = 0  # pieces of work
        self._working = False

    def work(self) -> None:
        """Another piece of work begins."""
        self._begun += 1
        self._working = True

    def rest(self) -> None:
        """The thread waits for work, however long."""
        self._working = False

    async def until_hung(self) -> None:
        """Return when a piece of work has taken `PATIENCE_S`; the log tells where the thread is.

        Looks are counted, not seconds: while the whole process is paused there are none.
        """
        looks = begun = 0
        while looks < _LOOKS:
            await asyncio.sleep(PATIENCE_S / _LOOKS)
            same = self._working and self._begun == begun
            looks = looks + 1 if same else 0
            begun = self._begun
        frame = sys._current_frames().get(self._thread.ident or 0)
        _log.error(
            "the %s thread hangs: it has been at one piece of work for %g s. This process ends, so "
            "that others take over; if the next one hangs, too, look at the device (dmesg, "
            "nvidia-smi). The thread is here:\n%s",
            *(self._thread.name, PATIENCE_S, "".join(traceback.format_stack(frame))),
        )
