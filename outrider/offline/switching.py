"""Set how this process's interpreter serves threads and garbage while a model is open in it."""

from __future__ import annotations

import gc
import sys
import threading
from typing import Final

from outrider.config import THREAD_SWITCH_S

_YOUNG_OBJECTS: Final = 5000
"""Python's 700 are fewer than a step of many rows makes; each look at them stops all threads."""


class Switching:
    """Lets threads take over sooner, and garbage wait longer, while any engine is open.

    What the program sets meanwhile stays as it is.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._engines = 0
        self._before = self._ours = (sys.getswitchinterval(), gc.get_threshold())

    def begin(self) -> None:
        with self._lock:
            if self._engines == 0:
                self._before = sys.getswitchinterval(), gc.get_threshold()
                switch_s, (young, *older) = self._before
                sys.setswitchinterval(min(switch_s, THREAD_SWITCH_S))
                if young:  # 0: off
                    gc.set_threshold(max(young, _YOUNG_OBJECTS), *older)
                self._ours = sys.getswitchinterval(), gc.get_threshold()
            self._engines += 1

    def end(self) -> None:
        with self._lock:
            self._engines -= 1
            if self._engines == 0:
                if sys.getswitchinterval() == self._ours[0]:
                    sys.setswitchinterval(self._before[0])
                if gc.get_threshold() == self._ours[1]:
                    gc.set_threshold(*self._before[1])


switching = Switching()
