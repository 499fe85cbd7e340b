"""What an engine step adds to the scorer's metrics, summed where it happens: once per step."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple


class Admission(NamedTuple):
    """A request that left the queue. One that was preempted and comes back is not another."""

    queue_s: float  # from its arrival; what it waits after a preemption is its own account's
    prompt_tokens: int
    cached_prompt_tokens: int


@dataclass(slots=True)
class StepCounts:
    """What happened since the step before, over all rows. Times are sums over rows, in seconds.

    The engine adds to it until it hands it over with the step's events; then nobody does.
    """

    rounds: Counter[tuple[int, int]] = field(default_factory=Counter)
    """Rows that decoded, by draft tokens verified and accepted of them, after trimming at a stop.
    A prompt's first token is a round only if a draft was verified with it."""
    drafted_by: Counter[str] = field(default_factory=Counter)  # draft tokens by proposer
    accepted_by: Counter[str] = field(default_factory=Counter)
    output_tokens: int = 0
    fates: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Rounds that wanted a draft, by proposer and what became of it: hit, late or wrong."""
    wait_s: float = 0.0  # of rows for their drafts
    propose_s: float = 0.0  # of drafts, as their proposers say
    network_s: float = 0.0  # from a commit to its draft's arrival, without propose_s
    score_s: float = 0.0  # of rounds: from a step's launch to its result
    plain_s: float = 0.0
    """What the same output would have taken in steps without drafts, by the policy's measured step
    times; 0 if that is not known or the step also processed prompts."""
    way: str = ""  # in which rows came to their drafts: "none", "on demand" or "ahead"
    admissions: list[Admission] = field(default_factory=list)
    preemptions: int = 0
