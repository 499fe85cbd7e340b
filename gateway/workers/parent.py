"""The end of a worker whose parent has ended."""

from __future__ import annotations

import ctypes
import os
import signal
from typing import Final

_PR_SET_PDEATHSIG: Final = 1


def die_with_parent(parent: int) -> None:
    """Have the kernel end this process when the one that started it ends, even if it hangs.

    Only Linux knows how; elsewhere `--exit-with-parent` does, once the event loop runs.
    """
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before
        os._exit(128 + signal.SIGKILL)
