"""What drafting ahead should bring, from a few measured numbers. Times in milliseconds.

T target step, d draft step, R the way there and back, c host time, K drafts, E tokens of a round
that had a draft, h1 and h0 the hit rates after a hit and after a miss. With A = K * d + R + c, the
time until a draft is there:

    on demand     S = E * T / (T + A)
    drafted ahead S = E * T / (max(T, (T + A) / 2, (K + 1) * d) + (1 - p) * A)

with p = h0 / (1 - h1 + h0) the share of hits that these rates settle at. Branches leave after K
forwards, and one more follows while they are on their way; what comes late gives the branches after
it a start; a miss is drafted on demand: drafting/ahead/outcomes.py, with branches as long as
drafts. All speed-ups are over T per token.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Times:
    step_ms: float
    draft_step_ms: float
    round_trip_ms: float
    host_ms: float

    def draft_ms(self, k: int) -> float:
        """Until k tokens are drafted and with the scorer."""
        return k * self.draft_step_ms + self.round_trip_ms + self.host_ms


def on_demand(times: Times, k: int, tokens: float) -> float:
    """Speed-up of a proposer that drafts when it is asked; `tokens` per round with a draft."""
    return tokens * times.step_ms / (times.step_ms + times.draft_ms(k))


def hit_share(after_hit: float, after_miss: float) -> float:
    """The share of hits in the long run."""
    return 1.0 if after_hit == 1.0 else after_miss / (1.0 - after_hit + after_miss)


def drafted_ahead(
    times: Times, k: int, tokens: float, after_hit: float, after_miss: float
) -> float:
    """Speed-up of a proposer that drafts for the outcomes before the verdict."""
    step_ms, draft_ms = times.step_ms, times.draft_ms(k)
    round_ms = max(step_ms, (step_ms + draft_ms) / 2, (k + 1) * times.draft_step_ms)
    round_ms += (1.0 - hit_share(after_hit, after_miss)) * draft_ms
    return tokens * step_ms / round_ms


def tokens_per_round(acceptance: float, k: int) -> float:
    """E(a, K) = 1 + a + ... + a^K."""
    return sum(acceptance**i for i in range(k + 1))
