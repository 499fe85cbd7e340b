"""Sum up speculation for one request, over all the scorers that served it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import zip_longest

from outrider.params import VerificationRule
from outrider.types import TokenKind
from outrider.v1 import common_pb2

_SUMMED = (
    *("iter_count", "rounds", "drafted", "accepted", "hits", "misses_late", "misses_wrong"),
    *("waits", "wait_ms", "fallback_rounds", "queue_ms", "prefill_ms", "propose_ms", "score_ms"),
    *("network_ms", "preemptions", "rounds_after_hit", "hits_after_hit", "rounds_after_miss"),
    "hits_after_miss",
)
_SUMMED_LISTS = ("accepted_per_pos", "k_histogram", "drafts_per_context", "accepted_per_context")


class Account:
    """Adds up the statistics of a request's segments: the stretches between changes of scorer.

    The scorer's own account of a segment counts. A scorer that died left none: then what the
    rounds showed stands in (rounds, iterations and accepted tokens; the drafts of a rejected
    tail, the methods that drafted and the times are not known). `rule` is the one asked for.
    """

    def __init__(self, rule: VerificationRule = VerificationRule.COUPLED) -> None:
        self._rule = rule
        self._total = common_pb2.AuxInfo(verification=rule.value, exact=True)
        self._seen = common_pb2.AuxInfo()
        self._plain_rounds = 0  # of `_seen`, not yet added
        self._reported: common_pb2.AuxInfo | None = None
        self._positions: list[int] = []  # of every token: draft position if accepted, else -1
        self._cached_prompt_tokens: int | None = None
        self.retries = 0

    def observe(self, kinds: Sequence[TokenKind]) -> None:
        """One message of the scorer, with the kinds of its tokens: one round or several."""
        count = len(kinds)
        if kinds.count(TokenKind.PLAIN) == count:  # rounds without a draft
            self._positions += [-1] * count
            self._plain_rounds += count
            return
        position = rounds = drafted = 0
        accepted_per_pos: list[int] = []
        for kind in kinds:
            rounds += position == 0
            if kind is TokenKind.ACCEPTED:
                self._positions.append(position)
                if position == len(accepted_per_pos):
                    accepted_per_pos.append(0)
                accepted_per_pos[position] += 1
                drafted += 1
                position += 1
            else:  # ends a round
                self._positions.append(-1)
                drafted += kind is TokenKind.RECOVERED
                position = 0
        seen = self._seen
        seen.rounds += rounds
        seen.iter_count += rounds
        seen.drafted += drafted
        if accepted_per_pos:
            seen.accepted += sum(accepted_per_pos)
            _add_elementwise(seen.accepted_per_pos, accepted_per_pos)

    def insert(self, num_tokens: int) -> None:
        """Count tokens of the output that no scorer wrote."""
        self._positions += [-1] * num_tokens

    def report(self, usage: common_pb2.Usage, aux_info: common_pb2.AuxInfo) -> None:
        """Take over the scorer's latest account of this segment."""
        self._reported = aux_info
        if self._cached_prompt_tokens is None:
            self._cached_prompt_tokens = usage.cached_prompt_tokens

    def end_segment(self) -> None:
        """No more will come from this scorer."""
        self._seen.rounds += self._plain_rounds
        self._seen.iter_count += self._plain_rounds
        self._plain_rounds = 0
        segment = self._seen if self._reported is None else self._reported
        for name in _SUMMED:
            setattr(self._total, name, getattr(self._total, name) + getattr(segment, name))
        for name in _SUMMED_LISTS:
            _add_elementwise(getattr(self._total, name), getattr(segment, name))
        known = set(self._total.proposer_ids)
        self._total.proposer_ids.extend(p for p in segment.proposer_ids if p not in known)
        _add_methods(self._total, segment.by_method)
        if segment.scorer_id:
            self._total.scorer_id = segment.scorer_id
            self._total.verification = segment.verification
            self._total.exact = self._total.exact and segment.exact
        elif segment.rounds:
            self._total.exact = self._total.exact and self._rule.exact
        if self._cached_prompt_tokens is None and self._positions:
            self._cached_prompt_tokens = 0  # not known; the next prompt holds what was written
        self._seen, self._reported = common_pb2.AuxInfo(), None

    @property
    def cached_prompt_tokens(self) -> int:
        """Of the client's prompt; what a resumed request finds cached is not the client's."""
        return self._cached_prompt_tokens or 0

    def close(self, *, output_len: int, cost_time_ms: float) -> common_pb2.AuxInfo:
        """Return the public account of the first `output_len` tokens, after `end_segment`.

        Accepted tokens behind a stop string do not count.
        """
        result = common_pb2.AuxInfo()
        result.CopyFrom(self._total)
        per_pos = result.accepted_per_pos
        for position in self._positions[output_len:]:
            if 0 <= position < len(per_pos) and per_pos[position]:
                result.accepted -= 1
                per_pos[position] -= 1
                _take_back(result)
        result.cost_time = cost_time_ms
        result.output_len = output_len
        result.avg_tokens_per_iter = output_len / max(1, result.iter_count)
        result.cached_prompt_tokens = self.cached_prompt_tokens
        result.retries = self.retries
        return result


def _add_elementwise(total: object, more: Sequence[int]) -> None:
    """`total` is a repeated protobuf field; it grows to the longer of the two."""
    sums = [a + b for a, b in zip_longest(total, more, fillvalue=0)]  # type: ignore[call-overload]
    total[:] = sums  # type: ignore[index]


def _add_methods(total: common_pb2.AuxInfo, more: Iterable[common_pb2.MethodCounts]) -> None:
    known = {counts.method: counts for counts in total.by_method}
    for counts in more:
        mine = known.get(counts.method) or total.by_method.add(method=counts.method)
        mine.drafted += counts.drafted
        mine.accepted += counts.accepted


def _take_back(result: common_pb2.AuxInfo) -> None:
    """One accepted token less. Which method drafted it is known only if there was one."""
    per_context = result.accepted_per_context
    last = next((i for i in reversed(range(len(per_context))) if per_context[i]), None)
    if last is not None:
        per_context[last] -= 1
    for counts in reversed(result.by_method):
        if counts.accepted:
            counts.accepted -= 1
            return
