"""Notices that a thread hangs, in a device call that never returns or a deadlock."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import traceback
from typing import Final

PATIENCE_S: Final = 300.0
"""Seconds that one piece of work, such as a step, may take: half of a gateway's default time for a
request, so that the request can still be served elsewhere."""

_LOOKS: Final = 100  # within these seconds
_log = logging.getLogger(__name__)


class Watchdog:
    """`thread` says when it works; the event loop looks whether its work ends."""

    def __init__(self, thread: threading.Thread) -> None:
        self._thread = thread
        # Written by the thread alone:
        self._begun = 0  # pieces of work so far
        self._working = False

    def work(self) -> None:
        """Note that another piece of work begins."""
        self._begun += 1
        self._working = True

    def idle(self) -> None:
        """Note that the thread waits for work, however long."""
        self._working = False

    async def until_hung(self) -> None:
        """Return when a piece of work has taken `PATIENCE_S`; the log shows the thread's stack.

        Looks are counted, not seconds, since a process that is paused has none.
        """
        looks = begun = 0
        while looks < _LOOKS:
            await asyncio.sleep(PATIENCE_S / _LOOKS)
            same = self._working and self._begun == begun
            looks = looks + 1 if same else 0
            begun = self._begun
        frame = sys._current_frames().get(self._thread.ident or 0)
        _log.error(
            "the %s thread hangs: one piece of work has taken %g s. This process ends, so that "
            "others take over; if the next one hangs, too, look at the device (dmesg, nvidia-smi). "
            "The thread is here:",
            *(self._thread.name, PATIENCE_S),
        )
        for line in "".join(traceback.format_stack(frame)).splitlines():
            _log.error("%s", line)
