"""What is known of a row's rounds: its drafts, who makes them, and what became of them."""

from __future__ import annotations

import enum
from collections import Counter, deque
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from outrider.types import TokenKind


class BlockFate(enum.Enum):
    """What became of a block when it was walked by the committed tokens."""

    USEFUL = "useful"
    LATE = "late"  # true so far, but nothing is left of it, or it never held a guess
    WRONG = "wrong"  # the truth does not lie on it
    INVALID = "invalid"  # it builds on tokens that were never committed


USEFUL = BlockFate.USEFUL  # Python 3.11 takes longer to find a member than to compare it


@dataclass(slots=True)
class Counters:
    """What is summed up for `RequestStats`; seconds here, milliseconds there."""

    iter_count: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    rounds_by_drafted: Counter[int] = field(default_factory=Counter)
    rounds_by_accepted: Counter[int] = field(default_factory=Counter)
    hits: int = 0
    misses_late: int = 0
    misses_wrong: int = 0
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
    by_method: dict[str, tuple[int, int]] = field(default_factory=dict)  # drafted, accepted

    def count_round(self, drafted: int, accepted: int, method: str) -> None:
        """One round that emitted something; `accepted` after trimming. `method` drafted."""
        if drafted and method:
            before = self.by_method.get(method, (0, 0))
            self.by_method[method] = (before[0] + drafted, before[1] + accepted)
        self.rounds += 1
        self.drafted += drafted
        self.accepted += accepted
        self.rounds_by_drafted[drafted] += 1
        self.rounds_by_accepted[accepted] += 1


class Round(NamedTuple):
    """What became of a row's draft in one step."""

    drafted: int  # tokens verified: of a tree all nodes
    depth: int  # of them after one another at most; a chain: all
    accepted: int  # of a tree the nodes of one path
    rejected: bool  # something was drafted where the accepted tokens end; not what came

    @property
    def tried(self) -> int:
        """Places at which the draft was right or wrong: later ones say nothing."""
        return self.accepted + self.rejected


@lru_cache(maxsize=4096)
def chain_round(drafted: int, accepted: int) -> Round:
    """The round of a chain."""
    return Round(drafted, drafted, accepted, accepted < drafted)


@lru_cache(maxsize=4096)
def token_kinds(tried: int, accepted: int, emitted: int) -> tuple[TokenKind, ...]:
    """Where each of `emitted` tokens of a round came from; see `Round`."""
    if not tried:
        last = TokenKind.PLAIN
    else:
        last = TokenKind.BONUS if accepted == tried else TokenKind.RECOVERED
    return ((TokenKind.ACCEPTED,) * accepted + (last,))[:emitted]


@dataclass(slots=True)
class Drafting:
    """What the policy knows about one row's proposer. Only the policy changes it."""

    limit: int  # K at most, as the request and the configuration allow
    warm: bool = False  # its temperature
    proposer_id: str | None = None
    drafter: str = ""  # the proposer with its method that drafted last: what takes its own time
    proposer_limit: int = 0
    can_run_ahead: bool = False  # the proposer
    runs_ahead: bool = False  # and does
    own_device: bool = False  # steps do not slow its drafts down
    colocated: bool = False  # drafts are made between steps, on the engine's thread: none is free
    num_draft_tokens: int = 0  # K of the next round
    commits: deque[tuple[int, float, bool]] = field(default_factory=lambda: deque(maxlen=8))
    """(committed length, when, whether no draft was left) of the last rounds: a block's base_len
    says which it answers."""
    committed_at: float = 0.0
    looked_at: float | None = None  # when the present round was first considered
    at_hand: bool = False  # a draft was there at that moment
    deadline: float = 0.0  # the present round waits no longer than this
    in_vain: tuple[float, float] = 0.0, 0.0  # since when and until when it last waited for nothing
    wrong: bool = False  # a guess for the present round did not lie on the committed path
    unlearned: Round | None = None  # the last round, until the policy has learned from it
    asked: bool = False  # who drafts knows that the next round is to have a draft
    no_guess_at: int = -1  # committed length for which the proposer said it has no guess
    misses: int = 0  # rounds in a row without a draft, waited for in vain
    rest: int = 0  # rounds until a proposer that was set aside is waited for again
    next_rest: int = 0
    blocks: int = 0  # that came from the present proposer
    awaited_since: float = 0.0  # when the first of them could be used, if it had come
    successes: float = 0.0  # draft tokens accepted, fading
    trials: float = 0.0  # draft tokens accepted or rejected, fading
    levels: float = 1.0  # depth of a draft per token of it, fading; a chain's is 1
    probing: bool = False  # the next round drafts more than seems best, to find out
    tries_most: bool = False  # the round that is under way does, or drafts the most it may
    wait_s: float = 0.0  # moving average of a round's wait
    hit: bool | None = None  # whether the last round that wanted a draft had one at once
    hit_share: float = 0.0  # of such rounds, fading
    has_guesses: bool = True  # often enough that it pays to wait for the proposer's answers
    guess_share: float = 1.0  # of these that hold one, fading
    no_guess_s: float = 0.0  # from a commit to one that holds none, fading
    free_tokens: float = 0.0  # accepted per round from drafts that were at hand at once, fading

    @property
    def waits(self) -> bool:
        """Whether the row waits for drafts at all."""
        if self.proposer_id is None or self.rest:
            return False
        return self.num_draft_tokens > 0 and self.has_guesses
