"""Where a sampled request's time went, as spans below its server span.

    queue | prefill | round 0 | ... | round 7 | rounds
                      wire, propose, wait, score, commit

They follow each other without a gap, so that they add up to the request. The first rounds have a
span each; what comes after them is one, with sums: a long answer would have thousands.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from outrider.rpc.telemetry import PastSpan
from outrider.types import Commit, RequestStats, StepTimings, TokenKind

MAX_ROUNDS: Final = 8
"""Rounds with a span of their own."""

PARTS: Final = ("wire", "propose", "wait", "score", "commit")
"""Of a round, in order."""

_MS: Final = 1_000_000  # nanoseconds
Bounds = tuple[int, int, int, int, int, int]
"""The beginning of each part and the end of the last, nanoseconds since 1970."""


class RoundSpans:
    """Made for requests that are sampled only. Used on the event loop, by the hub.

    It only notes what happens, to hold up nobody's next round; `end` makes the spans.
    """

    def __init__(self, clock: Callable[[], int] = time.time_ns) -> None:
        self._clock = clock
        self._began = self._round_began = clock()
        self._submitted = self._began
        self._first: int | None = None  # when the first tokens came
        self._block: tuple[int, int] | None = None  # this round's: arrival, drafting time
        self._rounds = 0
        self._shown: list[tuple[Commit, Bounds]] = []  # the rounds with a span of their own
        self._rest_began = 0
        self._rest_tokens = self._rest_accepted = 0
        self._rest_ns = [0] * len(PARTS)

    def submitted(self) -> None:
        """The engine has the request."""
        self._submitted = self._clock()

    def block(self, draft_us: int) -> None:
        """The draft that this round asked for has come."""
        if self._block is None:
            self._block = (self._clock(), draft_us * 1000)

    def commit(self, commit: Commit, timings: StepTimings | None) -> None:
        """A step has added to the request; its last part is the way to the event loop."""
        now = self._clock()
        if self._first is None:
            self._first = now
        elif timings is not None:
            self._add_round(commit, round_bounds(self._round_began, now, self._block, timings))
        self._block, self._round_began = None, now

    def end(self, stats: RequestStats | None) -> list[PastSpan]:
        """The spans, in order; no round will come. `stats` is what the engine told last."""
        end = self._round_began if self._first is not None else self._clock()
        first = end if self._first is None else self._first
        admitted = first
        if stats is not None:
            # Not by queue_ms: it waited again if it was preempted later.
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
    """Where the parts of a round, from commit to commit, begin and end.

    `block` is when the draft came and how long drafting took. A scorer that drafts itself has done
    so right before the step, for this row or for others: all wait for it. Without either, or with
    a block that came when the step had begun, nothing was waited for but the step. Where on its
    way the rest of a draft's time was spent is not known: all of it is drawn before the drafting.
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
