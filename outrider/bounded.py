"""Keep values by names that peers choose, for a bounded number of names."""

from __future__ import annotations

from typing import TypeVar

MAX_NAMES = 256  # by default, of proposers

K = TypeVar("K")
V = TypeVar("V")


def remember(known: dict[K, V], name: K, value: V, most: int = MAX_NAMES) -> V:
    """Keep and return a value by name, of the latest `most` names."""
    known.pop(name, None)
    known[name] = value
    if len(known) > most:
        del known[next(iter(known))]
    return value
