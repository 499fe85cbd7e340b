"""Spans of a sampled request's time, below its server span.

    queue | prefill | round 0 | ... | round 7 | rounds
                      wire, propose, wait, score, commit

The spans follow each other without a gap, so they add up to the request. The first rounds have a
span each, and all later ones share a span with sums.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from outrider.rpc.telemetry import PastSpan
from outrider.types import Commit, RequestStats, StepTimings, TokenKind

MAX_ROUNDS: Final = 8
"""Rounds with spans of their own."""

PARTS: Final = ("wire", "propose", "wait", "score", "commit")
"""Parts of a round, in order."""

_MS: Final = 1_000_000  # nanoseconds
Bounds = tuple[int, int, int, int, int, int]
"""Start of each part and end of the last, in nanoseconds since 1970."""


class RoundSpans:
    """Notes the times of a sampled request, of which `end` makes spans. Used on the event loop."""

    def __init__(self, clock: Callable[[], int] = time.time_ns) -> None:
        self._clock = clock
        self._began = self._round_began = clock()
        self._submitted = self._began
        self._first: int | None = None  # arrival of the first tokens
        self._block: tuple[int, int] | None = None  # arrival and drafting time of this round's
        self._rounds = 0
        self._shown: list[tuple[Commit, Bounds]] = []  # rounds with a span of their own
        self._rest_began = 0
        self._rest_tokens = self._rest_accepted = 0
        self._rest_ns = [0] * len(PARTS)

    def submitted(self) -> None:
        """Note that the engine has the request."""
        self._submitted = self._clock()

    def block(self, draft_us: int) -> None:
        """Note the draft that this round asked for."""
        if self._block is None:
            self._block = (self._clock(), draft_us * 1000)

    def commit(self, commit: Commit, timings: StepTimings | None) -> None:
        """Note the tokens of a step. Its last part includes the way to the event loop."""
        now = self._clock()
        if self._first is None:
            self._first = now
        elif timings is not None:
            self._add_round(commit, round_bounds(self._round_began, now, self._block, timings))
        self._block, self._round_began = None, now

    def end(self, stats: RequestStats | None) -> list[PastSpan]:
        """Return the spans in order, by the engine's latest `stats`."""
        end = self._round_began if self._first is not None else self._clock()
        first = end if self._first is None else self._first
        admitted = first
        if stats is not None:
            # queue_ms would also count waits after a preemption.
            admitted = max(self._submitted, first - round(stats.prefill_ms * _MS))
        spans = [PastSpan("queue", self._began, admitted)]
        if admitted < first:
            spans.append(PastSpan("prefill", admitted, first))
        spans += [_round(commit, bounds) for commit, bounds in self._shown]
        if self._rounds > MAX_ROUNDS:
            sums = {
                "outrider.rounds": self._rounds - MAX_ROUNDS,
                "outrider.tokens": self._rest_tokens,
                "outrider.accepted": self._rest_accepted,
            }
            for name, took in zip(PARTS, self._rest_ns, strict=True):
                sums[f"outrider.{name}_us"] = took // 1000
            spans.append(PastSpan("rounds", self._rest_began, end, sums))
        return spans

    def _add_round(self, commit: Commit, bounds: Bounds) -> None:
        self._rounds += 1
        if self._rounds <= MAX_ROUNDS:
            self._shown.append((commit, bounds))
            return
        self._rest_began = self._rest_began or self._round_began
        self._rest_tokens += len(commit.token_ids)
        self._rest_accepted += commit.kinds.count(TokenKind.ACCEPTED)
        for i in range(len(PARTS)):
            self._rest_ns[i] += bounds[i + 1] - bounds[i]


def _round(commit: Commit, bounds: Bounds) -> PastSpan:
    parts = zip(PARTS, bounds, bounds[1:], strict=False)
    return PastSpan(
        "round",
        bounds[0],
        bounds[-1],
        {
            "outrider.base_len": commit.base_len,
            "outrider.tokens": len(commit.token_ids),
            "outrider.accepted": commit.kinds.count(TokenKind.ACCEPTED),
        },
        tuple(PastSpan(name, start, end) for name, start, end in parts if start < end),
    )


def round_bounds(
    began: int, ended: int, block: tuple[int, int] | None, timings: StepTimings
) -> Bounds:
    """Return the bounds of a round's parts, from commit to commit.

    `block` is the arrival of the draft and the time of drafting. A scorer that drafts itself did so
    right before the step. Without either, or with a block that came after the step began, the round
    consists of the step. All network time is shown before the drafting.
    """
    committing = max(began, ended - round(timings.commit_ms * _MS))
    scoring = max(began, committing - round((timings.forward_ms + timings.verify_ms) * _MS))
    if block is None and timings.draft_ms:
        block = scoring, round(timings.draft_ms * _MS)
    arrived = drafting = began
    if block is not None and block[0] <= scoring:
        arrived = max(began, block[0])
        drafting = max(began, arrived - block[1])
    return (began, drafting, arrived, scoring, committing, ended)
