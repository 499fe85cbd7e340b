"""What drafting ahead should bring, from a few measured numbers. Times in milliseconds.

T target step, d draft step, R the way there and back, c host time, K drafts, E tokens of a round
that had a draft, h1 and h0 the hit rates after a hit and after a miss:

    on demand     S = E * T / (T + K * d + R + c)
    drafted ahead S = (p * E + (1 - p)) * T / max(T, D + R + c)

with D = (K + 1) * d the time that the branches take, and p = h0 / (1 - h1 + h0) the share of hits
that these rates settle at. A miss is taken to decode one token. All speed-ups are over T per token.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Times:
    step_ms: float
    draft_step_ms: float
    round_trip_ms: float
    host_ms: float


def on_demand(times: Times, k: int, tokens: float) -> float:
    """Speed-up of a proposer that drafts when it is asked; `tokens` per round with a draft."""
    round_ms = times.step_ms + k * times.draft_step_ms + times.round_trip_ms + times.host_ms
    return tokens * times.step_ms / round_ms


def hit_share(after_hit: float, after_miss: float) -> float:
    """The share of hits in the long run."""
    return 1.0 if after_hit == 1.0 else after_miss / (1.0 - after_hit + after_miss)


def drafted_ahead(
    times: Times, k: int, tokens: float, after_hit: float, after_miss: float
) -> float:
    """Speed-up of a proposer that drafts for the outcomes before the verdict."""
    share = hit_share(after_hit, after_miss)
    ahead_ms = (k + 1) * times.draft_step_ms + times.round_trip_ms + times.host_ms
    round_ms = max(times.step_ms, ahead_ms)
    return (share * tokens + 1.0 - share) * times.step_ms / round_ms


def tokens_per_round(acceptance: float, k: int) -> float:
    """E(a, K) = 1 + a + ... + a^K."""
    return sum(acceptance**i for i in range(k + 1))
