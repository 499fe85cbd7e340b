"""Set how soon threads of this process take over from each other."""

from __future__ import annotations

import sys
import threading

from outrider.config import THREAD_SWITCH_S


class Switching:
    """Lets threads take over from each other sooner while any engine is open."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._engines = 0
        self._before_s = 0.0

    def begin(self) -> None:
        with self._lock:
            if self._engines == 0:
                self._before_s = sys.getswitchinterval()
                sys.setswitchinterval(min(self._before_s, THREAD_SWITCH_S))
            self._engines += 1

    def end(self) -> None:
        with self._lock:
            self._engines -= 1
            if self._engines == 0:
                sys.setswitchinterval(self._before_s)


switching = Switching()
