"""Values that the reports are made from: completions and runs of a system."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

TokenIds = tuple[int, ...]


@dataclass(frozen=True)
class Completion:
    """The answer to one request. Times are seconds from the request's start."""

    token_ids: TokenIds
    total_s: float
    ttft_s: float | None = None  # None: the system does not tell
    stats: dict[str, float] = field(default_factory=dict)
    accepted_per_pos: tuple[int, ...] = ()
    round_gaps_s: tuple[float, ...] = ()  # between the messages of consecutive rounds

    @property
    def tpot_s(self) -> float | None:
        """Return the time per output token after the first."""
        if self.ttft_s is None or len(self.token_ids) < 2:
            return None
        return (self.total_s - self.ttft_s) / (len(self.token_ids) - 1)


@dataclass(frozen=True)
class Run:
    """One system's answers to a group of prompts. `wall_s` spans all of them."""

    completions: tuple[Completion, ...]
    wall_s: float
    # Verification rounds and draft tokens, where the system counts them.
    rounds: int | None = None
    drafted: int | None = None
    accepted: int | None = None

    @property
    def num_tokens(self) -> int:
        return sum(len(c.token_ids) for c in self.completions)

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.wall_s


def completions_of(answer: dict[str, Any]) -> tuple[Completion, ...]:
    """Return the completions in a worker's answer."""
    return tuple(
        Completion(tuple(c["token_ids"]), c["total_s"], c["ttft_s"]) for c in answer["completions"]
    )


class System(Protocol):
    """A system that generates text."""

    @property
    def name(self) -> str: ...

    @property
    def concurrencies(self) -> frozenset[int]:
        """Return the concurrencies at which the system is measured."""
        ...

    def run(self, prompts: Sequence[TokenIds], max_tokens: int, concurrency: int) -> Run:
        """Generate `max_tokens` for each prompt, `concurrency` at once. Raises `ProcessError`."""
        ...


def median(values: Sequence[float]) -> float | None:
    """Return the median, or None without values."""
    return statistics.median(values) if values else None


def first_divergence(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Return the first index at which two token sequences differ, or None."""
    shorter = min(len(a), len(b))
    first = next((i for i in range(shorter) if a[i] != b[i]), shorter)
    return None if first == len(a) == len(b) else first
