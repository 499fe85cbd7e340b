"""Ends vLLM's engine processes with the scorer, even if that is killed.

vLLM's own children outlive a parent that cannot say goodbye, and keep the GPU's memory.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import subprocess
import threading
from collections.abc import Iterator
from typing import Final

_WATCH: Final = r"""
tree() {
    grep -q resource_tracker "/proc/$1/cmdline" 2>/dev/null && return
    echo "$1"
    for child in $(cat "/proc/$1"/task/*/children 2>/dev/null); do tree "$child"; done
}
while read -r pid; do set -- "$@" "$pid"; done
kill -9 $(for pid; do tree "$pid"; done) 2>/dev/null
"""
"""Reads process ids until the end of its standard input, which comes with this process's end.

Then it kills them and their own children, but for those that clear away shared memory: these end by
themselves after the others.
"""
_LOOK_S: Final = 0.1
_END_S: Final = 5.0


class Reaper:
    """A shell that kills this process's children, and theirs, once this process is gone.

    Children must be spawned: a forked one would keep the shell's standard input open.
    """

    def __init__(self) -> None:
        self._shell = subprocess.Popen(
            ["/bin/sh", "-c", _WATCH],
            stdin=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,  # it outlives a Ctrl-C, too
        )
        self._told: set[int | None] = set()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch over children of `multiprocessing` that are started within, as soon as they are."""
        ended = threading.Event()

        def look() -> None:
            while not ended.wait(_LOOK_S):
                self._tell()

        thread = threading.Thread(target=look, name="reaper", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            self._tell()

    def _tell(self) -> None:
        pids = {child.pid for child in multiprocessing.active_children()} - self._told
        assert self._shell.stdin is not None
        with contextlib.suppress(OSError, ValueError):  # the shell has ended
            self._shell.stdin.write(b"".join(b"%d\n" % pid for pid in pids if pid is not None))
            self._told |= pids

    def reap(self) -> None:
        """Kill the children now."""
        assert self._shell.stdin is not None
        self._shell.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._shell.wait(_END_S)

    def dismiss(self) -> None:
        """End the shell: the children have ended."""
        self._shell.kill()
        self._shell.wait()
        assert self._shell.stdin is not None
        self._shell.stdin.close()
