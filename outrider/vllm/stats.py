"""Keep what vLLM's scheduler says of its load and its speculation. Imports no vLLM."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from outrider.types import EngineSnapshot


class Load:
    """The latest of all engines of one `AsyncLLM`: several with data parallelism."""

    def __init__(self) -> None:
        self.total_pages = 0
        self._engines: dict[int, tuple[int, int, float]] = {}  # running, waiting, used part
        self._rounds: Counter[tuple[int, int]] = Counter()

    def record(self, scheduler_stats: Any, engine: int) -> None:
        """Take vLLM's `SchedulerStats` of one step."""
        self._engines[engine] = (
            scheduler_stats.num_running_reqs,
            scheduler_stats.num_waiting_reqs,
            scheduler_stats.kv_cache_usage,
        )
        drafts = scheduler_stats.spec_decoding_stats
        if drafts is not None:
            self._rounds += rounds_of(
                drafts.num_drafts, drafts.num_draft_tokens, drafts.num_accepted_tokens_per_pos
            )

    def snapshot(self) -> EngineSnapshot:
        """Sum up the engines."""
        engines = self._engines.values()
        used = sum(part for _, _, part in engines) / max(1, len(engines))
        return EngineSnapshot(
            running=sum(running for running, _, _ in engines),
            waiting=sum(waiting for _, waiting, _ in engines),
            free_pages=round(self.total_pages * (1.0 - used)),
            total_pages=self.total_pages,
        )

    def take_rounds(self) -> Counter[tuple[int, int]]:
        """Return the rounds since the last call, by (drafted, accepted) tokens."""
        rounds, self._rounds = self._rounds, Counter()
        return rounds


def rounds_of(drafts: int, drafted: int, accepted_at: Sequence[int]) -> Counter[tuple[int, int]]:
    """Return rounds by (drafted, accepted) tokens that have these sums.

    `accepted_at[i]` rounds accepted their draft token i. Drafts are taken to be of equal length,
    but for those that accepted more.
    """
    bounds = [drafts, *accepted_at, 0]
    accepted = [n for n in range(len(bounds) - 1) for _ in range(bounds[n] - bounds[n + 1])]
    rounds: Counter[tuple[int, int]] = Counter()
    left, surplus = drafted, sum(accepted)
    for place, kept in enumerate(reversed(accepted)):
        surplus -= kept
        share = -(-left // (drafts - place))
        k = max(kept, min(share, left - surplus))
        left -= k
        rounds[k, kept] += 1
    return rounds
