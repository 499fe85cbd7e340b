"""A request's time in the scorer, as spans."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

from outrider.engine.sequence import Sequence
from outrider.params import SamplingParams
from outrider.policy.row import Drafting, Offered
from outrider.rpc.telemetry import PastSpan
from outrider.types import Commit, Request, StepTimings, TokenKind
from scorer_service.round_spans import MAX_ROUNDS, PARTS, RoundSpans, round_bounds

MS = 1_000_000
STEP = StepTimings(
    schedule_ms=1.0,
    forward_ms=5.0,
    verify_ms=1.0,
    commit_ms=2.0,
    idle_ms=0.0,
    num_rows=1,
    num_tokens=5,
)


def parts(
    block: tuple[int, int] | None, ended: int = 20, step: StepTimings = STEP
) -> list[tuple[str, float, float]]:
    bounds = round_bounds(0, ended * MS, block, step)
    assert (bounds[0], bounds[-1]) == (0, ended * MS)
    assert list(bounds) == sorted(bounds)
    found = zip(PARTS, bounds, bounds[1:], strict=False)
    return [(name, start / MS, end / MS) for name, start, end in found if start < end]


def test_round_spans_when_round_waits_show_its_draft() -> None:
    assert parts((10 * MS, 4 * MS)) == [
        ("wire", 0, 6),
        ("propose", 6, 10),
        ("wait", 10, 12),
        ("score", 12, 18),
        ("commit", 18, 20),
    ]


def test_round_spans_when_draft_is_at_hand_or_late_show_the_step() -> None:
    on_hand = [("wait", 0, 12), ("score", 12, 18), ("commit", 18, 20)]
    assert parts(None) == on_hand
    assert parts((13 * MS, 4 * MS)) == on_hand


def test_round_spans_of_a_drafting_scorer_show_drafts_before_the_step() -> None:
    assert parts(None, step=replace(STEP, draft_ms=7.0)) == [
        ("wire", 0, 5),
        ("propose", 5, 12),
        ("score", 12, 18),
        ("commit", 18, 20),
    ]


def test_round_spans_when_clocks_disagree_stay_within_the_round() -> None:
    assert parts((5 * MS, 40 * MS), ended=5) == [("score", 0, 3), ("commit", 3, 5)]
    assert parts((1 * MS, 40 * MS), ended=10) == [
        ("propose", 0, 1),
        ("wait", 1, 2),
        ("score", 2, 8),
        ("commit", 8, 10),
    ]


@dataclass
class Clock:
    now: int = 1_700_000_000_000_000_000

    def __call__(self) -> int:
        self.now += 10 * MS
        return self.now


def spans_of(rounds: int) -> list[PastSpan]:
    spans = RoundSpans(Clock())
    spans.submitted()
    for number in range(rounds + 1):
        spans.commit(Commit(1, number, (7, 8), (TokenKind.ACCEPTED, TokenKind.BONUS), 4), STEP)
    return spans.end(None)


def test_round_spans_of_a_long_request_are_bounded_and_add_up() -> None:
    spans = spans_of(rounds=3000)
    assert [span.name for span in spans] == ["queue", *["round"] * MAX_ROUNDS, "rounds"]
    for span in spans[1:-1]:
        assert [part.name for part in span.children] == ["wait", "score", "commit"]
        assert sum(part.end - part.start for part in span.children) == span.end - span.start
    rest = spans[-1].attributes
    assert rest is not None
    assert rest["outrider.rounds"] == 3000 - MAX_ROUNDS
    assert rest["outrider.tokens"] == 2 * (3000 - MAX_ROUNDS)
    assert rest["outrider.score_us"] == 6000 * (3000 - MAX_ROUNDS)
    assert sum(span.end - span.start for span in spans) == (3000 + 2) * 10 * MS
    assert all(a.end == b.start for a, b in pairwise(spans))


def test_round_spans_of_first_round_leave_later_waits_out() -> None:
    spans = RoundSpans(Clock())
    spans.submitted()
    for number in range(2):
        spans.commit(Commit(1, number, (7,), (TokenKind.PLAIN,), 4), STEP)
    seq = Sequence(
        Request(1, (7,), SamplingParams()),
        max_len=9,
        stop_ids=frozenset(),
        drafting=Drafting(Offered(4)),
        submitted_at=0.0,
    )
    seq.counters.queue_s, seq.counters.prefill_s = 0.305, 0.004
    queue, prefill = spans.end(seq.stats())[:2]
    assert (queue.name, prefill.name) == ("queue", "prefill")
    assert queue.end == prefill.start
    assert prefill.end - prefill.start == 4 * MS


def test_round_spans_of_request_aborted_before_first_token_show_the_queue() -> None:
    (span,) = spans_of(rounds=-1)
    assert (span.name, span.children) == ("queue", ())
