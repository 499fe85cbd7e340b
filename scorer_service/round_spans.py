"""Where a sampled request's time went, as spans below its server span.

    queue | prefill | round 0 | ... | round 7 | rounds
                      wire, propose, wait, score, commit

They follow each other without a gap, so that they add up to the request. The first rounds have a
span each; what comes after them is one, with sums: a long answer would have thousands.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Final

from opentelemetry import trace

from outrider.types import Commit, RequestStats, StepTimings, TokenKind

MAX_ROUNDS: Final = 8
"""Rounds with a span of their own."""

_MS: Final = 1_000_000  # nanoseconds
Part = tuple[str, int, int]
"""Name, start and end, nanoseconds since 1970."""


class RoundSpans:
    """Made for requests that are sampled only. Used on the event loop, by the hub."""

    def __init__(
        self, tracer: trace.Tracer, parent: trace.Span, clock: Callable[[], int] = time.time_ns
    ) -> None:
        self._tracer = tracer
        self._context = trace.set_span_in_context(parent)
        self._clock = clock
        self._began = self._round_began = clock()
        self._submitted = self._began
        self._first: int | None = None  # when the first tokens came
        self._block: tuple[int, int] | None = None  # this round's: arrival, drafting time
        self._rounds = 0
        self._rest_began = 0
        self._rest: Counter[str] = Counter()

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
            self._add_round(commit, round_parts(self._round_began, now, self._block, timings))
        self._block, self._round_began = None, now

    def end(self, stats: RequestStats | None) -> None:
        """No more will come; `stats` is what the engine told last."""
        end = self._round_began if self._first is not None else self._clock()
        first = end if self._first is None else self._first
        admitted = first
        if stats is not None:
            admitted = min(first, self._submitted + round(stats.queue_ms * _MS))
        self._span("queue", self._began, admitted, {})
        if admitted < first:
            self._span("prefill", admitted, first, {})
        if self._rounds > MAX_ROUNDS:
            sums = {f"outrider.{name}": value for name, value in self._rest.items()}
            self._span("rounds", self._rest_began, end, sums)

    def _add_round(self, commit: Commit, parts: list[Part]) -> None:
        counts = {
            "tokens": len(commit.token_ids),
            "accepted": commit.kinds.count(TokenKind.ACCEPTED),
        }
        self._rounds += 1
        if self._rounds > MAX_ROUNDS:
            self._rest_began = self._rest_began or self._round_began
            self._rest.update(counts, rounds=1)
            for name, start, end in parts:
                self._rest[f"{name}_us"] += (end - start) // 1000
            return
        attributes = {f"outrider.{name}": value for name, value in counts.items()}
        attributes["outrider.base_len"] = commit.base_len
        span = self._span("round", parts[0][1], parts[-1][2], attributes)
        context = trace.set_span_in_context(span)
        for name, start, end in parts:
            if start < end:
                self._tracer.start_span(name, context, start_time=start).end(end)

    def _span(self, name: str, start: int, end: int, attributes: dict[str, int]) -> trace.Span:
        span = self._tracer.start_span(name, self._context, attributes=attributes, start_time=start)
        span.end(end)
        return span


def round_parts(
    began: int, ended: int, block: tuple[int, int] | None, timings: StepTimings
) -> list[Part]:
    """A round's time from commit to commit, nanoseconds, in parts that follow each other.

    `block` is when the draft came and how long drafting took. Without one, or with one that came
    when the step had begun, nothing was waited for but the step. Where on its way the rest of a
    draft's time was spent is not known: all of it is drawn before the drafting.
    """
    committing = max(began, ended - round(timings.commit_ms * _MS))
    scoring = max(began, committing - round((timings.forward_ms + timings.verify_ms) * _MS))
    arrived = drafting = began
    if block is not None and block[0] <= scoring:
        arrived = max(began, block[0])
        drafting = max(began, arrived - block[1])
    return [
        ("wire", began, drafting),
        ("propose", drafting, arrived),
        ("wait", arrived, scoring),
        ("score", scoring, committing),
        ("commit", committing, ended),
    ]
