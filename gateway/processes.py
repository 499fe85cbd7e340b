"""Count the workers of a gateway, name one to its process, and end it with its parent."""

from __future__ import annotations

import ctypes
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from outrider.errors import ConfigError

_CORES_EACH: Final = 4
"""Cores for each worker by default: scorers, proposers and clients want some, too."""
_MOST_BY_DEFAULT: Final = 4
_PR_SET_PDEATHSIG: Final = 1
_CPU_MAX: Final = Path("/sys/fs/cgroup/cpu.max")


@dataclass(frozen=True, slots=True)
class Worker:
    """One process of a gateway that has several."""

    index: int
    count: int
    parent: int  # process id
    folder: Path
    """A folder for what the workers share. Their parent makes it, for this user alone."""

    @classmethod
    def parse(cls, text: str) -> Worker:
        """Read what `str` writes."""
        index, count, parent, folder = text.split(":", 3)
        return cls(int(index), int(count), int(parent), Path(folder))

    def __str__(self) -> str:
        return f"{self.index}:{self.count}:{self.parent}:{self.folder}"


def default_workers() -> int:
    """Return one worker for every four cores that this process may use, up to four."""
    return max(1, min(_MOST_BY_DEFAULT, int(_cores() // _CORES_EACH)))


def _cores() -> float:
    """Return the cores of this process, or the share of them that its container is limited to."""
    cores = float(len(os.sched_getaffinity(0)))
    try:
        quota, period = _CPU_MAX.read_text().split()
        return min(cores, int(quota) / int(period))
    except (OSError, ValueError):  # no cgroup v2, or no limit ("max")
        return cores


def check_workers(workers: int) -> None:
    """Raise `ConfigError`."""
    if not 1 <= workers <= 64:
        raise ConfigError("--workers must be between 1 and 64.")


def die_with_parent(parent: int) -> None:
    """Have the kernel end this process when the one that started it ends, even if it hangs.

    Only Linux knows how; elsewhere `--exit-with-parent` does, once the event loop runs.
    """
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before
        os._exit(128 + signal.SIGKILL)
