"""Sums that an engine step adds to the scorer's metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

DRAFT_FATES: Final = ("hit", "waited", "late", "wrong", "none")
"""What may become of the draft that a round wanted: it was at hand at once; it came while the row
waited; it did not come in time; what came was for another text; the proposer had no guess. A round
that waited for a proposer that drafts ahead is late or wrong. A round wants no draft while nobody
would wait for one."""

DRAFT_MODES: Final = ("none", "on demand", "ahead")
"""How a step's rows come to drafts: not at all; each is made when the round before it has ended; or
while that is verified, by the proposer of at least one row."""


class Admission(NamedTuple):
    """A request that left the queue; its return after a preemption is not another."""

    queue_s: float  # from its arrival
    prompt_tokens: int
    cached_prompt_tokens: int


def context_class(length: int) -> int:
    """Return 0 for a context below 1024 tokens, and one more for every fourfold length."""
    return (length.bit_length() - 9) // 2 if length >= 1024 else 0


def context_class_from(index: int) -> int:
    """Return the shortest context of a class."""
    return 1 << (8 + 2 * index) if index else 0


class RoundSums(NamedTuple):
    """The sums over rounds by their (drafted, accepted) tokens."""

    drafted: int
    accepted: int
    by_k: Counter[int]  # rounds by the tokens that they verified
    by_position: Counter[int]  # rounds that accepted the token at this place of their draft


def sum_rounds(rounds: Mapping[tuple[int, int], int]) -> RoundSums:
    """Sum up numbers of rounds by (drafted, accepted) tokens."""
    drafted = accepted = 0
    by_k: Counter[int] = Counter()
    by_position: Counter[int] = Counter()
    for (k, kept), number in rounds.items():
        drafted += k * number
        accepted += kept * number
        by_k[k] += number
        for position in range(kept):
            by_position[position] += number
    return RoundSums(drafted, accepted, by_k, by_position)


@dataclass(slots=True)
class StepCounts:
    """Events since the step before, over all rows. Times are sums over rows, in seconds.

    The engine adds to the counts until it hands them over with the step's events.
    """

    rounds: Counter[tuple[int, int]] = field(default_factory=Counter)
    """Rounds by (drafted, accepted) tokens, after trimming at a stop. A prompt's first token is a
    round only if a draft was verified with it."""
    drafted_by: Counter[str] = field(default_factory=Counter)  # draft tokens by proposer
    accepted_by: Counter[str] = field(default_factory=Counter)
    drafts_by_context: Counter[int] = field(default_factory=Counter)
    """Rounds that verified a draft, by `context_class`."""
    accepted_by_context: Counter[int] = field(default_factory=Counter)
    output_tokens: int = 0
    fates: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Rounds that wanted a draft, each once, by (proposer, one of `DRAFT_FATES`)."""
    wait_s: float = 0.0  # of rows for their drafts
    propose_s: float = 0.0  # of drafts, as reported by their proposers
    network_s: float = 0.0  # from a commit to its draft's arrival, without propose_s
    score_s: float = 0.0  # of rounds: from a step's launch to its result
    plain_s: float = 0.0
    """Expected time of the same output in steps without drafts; 0 if unknown or the step also
    processed prompts."""
    draft_mode: str = ""  # of `DRAFT_MODES`: how the rows of a step come to drafts
    admissions: list[Admission] = field(default_factory=list)
    preemptions: int = 0
