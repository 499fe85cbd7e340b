"""Ends vLLM's engine processes with the scorer, even if that is killed.

vLLM's own children outlive a parent that cannot say goodbye, and keep the GPU's memory.
"""

from __future__ import annotations

import multiprocessing
import subprocess
from typing import Final

_WATCH: Final = 'read -r _; kill -9 "$@" 2>/dev/null'
"""Waits for the end of its standard input, which comes with this process's end."""


class Reaper:
    """A shell that kills this process's children once this process is gone."""

    def __init__(self) -> None:
        """Watch over the present children of `multiprocessing`."""
        pids = [str(child.pid) for child in multiprocessing.active_children()]
        self._shell = subprocess.Popen(
            ["/bin/sh", "-c", _WATCH, "sh", *pids],
            stdin=subprocess.PIPE,
            start_new_session=True,  # it outlives a Ctrl-C, too
        )

    def dismiss(self) -> None:
        """End the shell: the children have ended."""
        self._shell.kill()
        self._shell.wait()
        assert self._shell.stdin is not None
        self._shell.stdin.close()
