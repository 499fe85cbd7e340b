"""What became of drafts and rounds, and the sums of a request over them."""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from outrider.types import TokenKind


class BlockFate(enum.Enum):
    """The outcome of the walk of a block by the committed tokens."""

    USEFUL = "useful"
    LATE = "late"  # true so far, but nothing is left of it, or it never held a guess
    WRONG = "wrong"  # the truth does not lie on it
    INVALID = "invalid"  # it builds on tokens that were never committed


USEFUL = BlockFate.USEFUL  # Python 3.11 takes longer to find a member than to compare it


CountedRound = tuple[int, int, str, str, int]
"""Tokens drafted and, after trimming, accepted; proposer, method and `context_class` of a draft.

One key serves a request's account, which needs no proposer, and the step's."""


@dataclass(slots=True)
class Counters:
    """The sums behind `RequestStats`, in seconds where that has milliseconds."""

    iter_count: int = 0
    drafted_rounds: Counter[CountedRound] = field(default_factory=Counter)
    """Rounds that verified a draft and emitted something."""
    undrafted: int = 0  # other rounds that emitted something
    fates: Counter[str] = field(default_factory=Counter)  # rounds by `DRAFT_FATES`
    waits: int = 0
    wait_s: float = 0.0
    fallback_rounds: int = 0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    propose_s: float = 0.0
    score_s: float = 0.0
    network_s: float = 0.0
    cached_prompt_tokens: int = 0
    proposer_ids: list[str] = field(default_factory=list)
    preemptions: int = 0
    after_hit: list[int] = field(default_factory=lambda: [0, 0])  # misses, hits
    after_miss: list[int] = field(default_factory=lambda: [0, 0])


class Round(NamedTuple):
    """The outcome of a row's draft in one step."""

    drafted: int  # tokens verified: of a tree all nodes
    depth: int  # of them after one another at most; a chain: all
    accepted: int  # of a tree the nodes of one path
    rejected: bool  # something was drafted where the accepted tokens end; not what came
    last: int = -1  # accepted node of the draft; -1: none was

    @property
    def tried(self) -> int:
        """Places at which the draft was right or wrong: later ones say nothing."""
        return self.accepted + self.rejected


UNDRAFTED = Round(0, 0, 0, rejected=False)


@lru_cache(maxsize=4096)
def chain_round(drafted: int, accepted: int) -> Round:
    """Return the round of a chain."""
    return Round(drafted, drafted, accepted, accepted < drafted, accepted - 1)


@lru_cache(maxsize=4096)
def token_kinds(tried: int, accepted: int, emitted: int) -> tuple[TokenKind, ...]:
    """Return where each of `emitted` tokens of a round came from; see `Round`."""
    if not tried:
        last = TokenKind.PLAIN
    else:
        last = TokenKind.BONUS if accepted == tried else TokenKind.RECOVERED
    return ((TokenKind.ACCEPTED,) * accepted + (last,))[:emitted]


@lru_cache(maxsize=4096)
def chain_outcome(drafted: int, accepted: int, emitted: int) -> tuple[Round, tuple[TokenKind, ...]]:
    """Return the round of a chain, and where each of its `emitted` tokens came from."""
    round_ = chain_round(drafted, accepted)
    return round_, token_kinds(round_.tried, min(accepted, emitted), emitted)
