"""Times of the phases of a start, for the line that ends it.

There is one stopwatch per process, as there is one log. Whoever starts something ends with
`summary`, which begins anew.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

_OTHER = "other"  # the time outside of all phases
_seconds: dict[str, float] = {}  # by phase, in the order of their beginnings
_open: list[str] = []  # the phases that run, of which the last one's time counts
_began = _counted = time.perf_counter()


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Count the time within for a phase, less that of the phases within it."""
    _count()
    _open.append(name)
    _seconds.setdefault(name, 0.0)
    try:
        yield
    finally:
        _count()
        _open.pop()


def summary() -> str:
    """Return, as `13.1 s: imports 3.2, weights 9.8, other 0.1`, the time since the last summary.

    The first one counts from the import of this module.
    """
    global _began
    _count()
    _seconds[_OTHER] = _seconds.pop(_OTHER, 0.0)  # comes last
    parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in _seconds.items())
    text = f"{_counted - _began:.1f} s: {parts}"
    _seconds.clear()
    _began = _counted
    return text


def _count() -> None:
    """Give the time since the last call to the phase that runs."""
    global _counted
    now = time.perf_counter()
    name = _open[-1] if _open else _OTHER
    _seconds[name] = _seconds.get(name, 0.0) + now - _counted
    _counted = now
