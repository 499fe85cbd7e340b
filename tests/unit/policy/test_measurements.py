"""What steps and drafts take, and how many draft tokens that makes worth verifying."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.draft_port import DraftOffer
from outrider.policy import measurements
from outrider.policy.acceptance import Acceptance
from outrider.policy.adaptive import AdaptivePolicy
from outrider.policy.measurements import DraftTimes
from outrider.policy.row import Drafting, Offered
from outrider.rounds import Round
from outrider.step_times import StepSizes

# Seconds of a 62 M model's steps by tokens.
STEP_S = ((1, 0.0075), (4, 0.0078), (8, 0.0089), (16, 0.0110), (64, 0.0260), (640, 0.2))


def row(k: int, *, sampled: bool = False, proposer: str = "a") -> Drafting:
    return Drafting(Offered(k, sampled, DraftOffer(proposer, k)), drafter=proposer)


def met(rows: list[Drafting], round_: Round, acceptance: Acceptance, times: int = 100) -> None:
    for _ in range(times):
        acceptance.observe([(each, round_, b"") for each in rows])


def counts(
    rows: list[Drafting], rounds: Sequence[Round], steps: tuple[tuple[int, float], ...]
) -> list[int]:
    """What rows draft after many such rounds."""
    policy = AdaptivePolicy(16)
    for _ in range(50):
        for round_ in rounds:
            met(rows, round_, policy.measured.acceptance, times=1)
    for num_tokens, seconds in steps:
        policy.measured.costs.observe_step(len(rows), num_tokens, seconds)
    return policy.choose_counts(rows)


def test_drafts_grow_with_acceptance_and_shrink_with_load() -> None:
    rounds = [Round(8, 8, accepted, rejected=accepted < 8) for accepted in (0, 1, 3, 8)]
    by_agreement = [counts([row(8)], [each], STEP_S)[0] for each in rounds]
    assert by_agreement == sorted(by_agreement)
    assert (by_agreement[0], by_agreement[-1]) == (0, 8)
    by_rows = [counts([row(8) for _ in range(n)], rounds, STEP_S)[0] for n in (1, 4, 16, 64)]
    assert by_rows == sorted(by_rows, reverse=True)
    assert by_rows[0] > by_rows[-1]


def test_rows_share_a_step_by_what_their_drafts_meet() -> None:
    """Every token has the same price, so those of the row whose drafts come true are bought."""
    good, poor = row(8), row(8)
    policy = AdaptivePolicy(8)
    for _ in range(40):
        rounds = (good, Round(8, 8, 8, rejected=False)), (poor, Round(8, 8, 0, rejected=True))
        policy.measured.acceptance.observe([(*each, b"") for each in rounds])
    for num_tokens in (2, 4, 8, 16):
        policy.measured.costs.observe_step(2, num_tokens, 0.004 + 0.001 * num_tokens)
    assert policy.choose_counts([good, poor]) == [8, 0]


@pytest.mark.parametrize(("token_s", "expected"), [(0.0, 12), (0.002, 1)])
def test_tokens_that_take_long_to_draft_are_not_asked_for(token_s: float, expected: int) -> None:
    """A step waits for the drafts, which take that long."""
    policy, each = AdaptivePolicy(12), row(12)
    met([each], Round(2, 2, 1, rejected=True), policy.measured.acceptance)
    for num_tokens in (1, 13):
        policy.measured.costs.observe_step(1, num_tokens, 0.0048)
    times = policy.measured.costs.draft_times(each)
    times.observe(0.0, 0.001 + 4 * token_s, 4 * token_s, 4, alone=True)
    assert policy.choose_counts([each]) == [expected]


def test_a_row_that_drafts_nothing_comes_back_to_its_proposers_acceptance() -> None:
    acceptance, poor, others = Acceptance(), row(4), row(4)
    met([others], Round(4, 4, 4, rejected=False), acceptance)
    met([poor], Round(4, 4, 0, rejected=True), acceptance, times=8)
    before = acceptance.survivals([poor, others], 1)
    met([poor], Round(0, 0, 0, rejected=False), acceptance, times=64)
    after = acceptance.survivals([poor, others], 1)
    assert before[0] < 0.7 * before[1]
    assert after[0] == pytest.approx(after[1], rel=0.1)


def test_acceptance_differs_by_depth_and_by_kind_of_text() -> None:
    acceptance, greedy, sampled = Acceptance(), row(4), row(4, sampled=True)
    met([greedy], Round(4, 4, 2, rejected=True), acceptance)
    met([sampled], Round(4, 4, 0, rejected=True), acceptance)
    first, second, third, _ = acceptance.survivals([row(4)], 4)[0]
    assert first > second > 0.9
    assert third < 0.1
    assert acceptance.survivals([row(4, sampled=True)], 1)[0] < 0.1


def test_of_a_tree_the_levels_are_gained_and_the_nodes_are_paid_for() -> None:
    steps = tuple((n, 0.002 + 0.002 * n) for n in (1, 2, 4, 8, 16))
    for depth, expected in ((9, 9), (3, 0)):  # of nine nodes; all levels come true
        assert counts([row(9)], [Round(9, depth, depth, rejected=False)], steps) == [expected]


def test_proposers_of_ever_new_names_do_not_fill_the_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(measurements, "MAX_NAMES", 8)
    policy = AdaptivePolicy(4)
    for i in range(20):
        met([each := row(4, proposer=f"p{i}")], Round(4, 4, 1, True), policy.measured.acceptance, 1)
        policy.measured.costs.draft_times(each)
    assert len(policy.measured.acceptance._kinds) == len(policy.measured.costs._drafts) == 8


SIZES = ((1, 1), (8, 8), (1, 5), (8, 40), (32, 32), (32, 64), (32, 96), (32, 160))


def test_drafts_fill_the_captured_size_that_pays_and_begin_no_other() -> None:
    """All tokens of a size cost the same, so it is filled; one token more costs the next size."""
    policy = AdaptivePolicy(4)
    costs = policy.measured.costs
    costs.sizes = StepSizes(SIZES)
    for size in SIZES:
        costs.observe_step(*size, 0.010 + 0.0001 * size[1])
    costs.observe_step(20, 20, 0.0132)
    rows = [row(4) for _ in range(20)]
    for accepted in (4, 3, 0, 1, 0, 4, 0, 0) * 20:
        met(rows, Round(4, 4, accepted, rejected=accepted < 4), policy.measured.acceptance, 1)
    assert len(rows) + sum(policy.choose_counts(rows)) in {64, 96}
    # A step of 70 tokens took as long as its size does.
    before = costs.steps.estimate(96)
    costs.observe_step(32, 70, 0.005)
    assert costs.steps.estimate(96) < before


def test_drafts_beside_steps_count_only_where_there_are_no_others() -> None:
    times, at = DraftTimes(), itertools.count()
    times.observe(next(at), 0.020, 0.001, 4, alone=False)
    assert times.mean_s(4) == pytest.approx(0.020)
    times.observe(next(at), 0.004, 0.001, 4, alone=True)
    for _ in range(100):
        times.observe(next(at), 0.020, 0.001, 4, alone=False)
    assert times.mean_s(4) == pytest.approx(0.004)
    assert times.contention_s(4) == pytest.approx(0.016, rel=0.1)


@pytest.mark.parametrize("alone", [False, True])
def test_of_drafts_that_took_longer_without_a_step_the_last_ones_count(alone: bool) -> None:
    """Rows that do not wait have no others; 32 rows in one step have none beside steps again."""
    times, at = DraftTimes(), itertools.count()
    times.observe(next(at), 0.005 if alone else 1.0, 0.001, 4, alone=not alone)
    for _ in range(20):
        times.observe(next(at), 0.006, 0.002, 4, alone=alone)
    assert times.mean_s(4) == pytest.approx(0.006)
    assert times.contention_s(4) == 0.0


SECONDS = st.floats(0.0, 1e4)
ANSWERS = st.lists(st.tuples(SECONDS, SECONDS, st.integers(0, 128), st.booleans()), max_size=30)


@given(ANSWERS)
def test_delays_are_numbers_and_not_negative_whatever_is_measured(
    answers: list[tuple[float, float, int, bool]],
) -> None:
    times = DraftTimes()
    for at, (seconds, draft_s, num_tokens, alone) in enumerate(answers):
        times.observe(at, seconds, draft_s, num_tokens, alone=alone)
        for k in (0, 1, 128):
            found = (times.mean_s(k), times.most_s(k), times.contention_s(k), times.token_s)
            assert all(0.0 <= each < float("inf") for each in found)


@pytest.mark.parametrize("num_rows", [8, 100])
def test_a_step_without_drafts_is_priced_by_its_own_size(num_rows: int) -> None:
    """Though only a few of its rows choose: a fraction more would be the next size."""
    policy = AdaptivePolicy(4)
    costs = policy.measured.costs
    costs.sizes = StepSizes([(num_rows, num_rows), (num_rows, 2 * num_rows), (128, 640)])
    costs.observe_step(num_rows, num_rows, 0.010)
    costs.observe_step(num_rows, 2 * num_rows, 0.1)
    costs.observe_step(128, 640, 0.2)
    costs.observe_step(num_rows, num_rows, 0.010)
    for choosing in range(1, num_rows + 1):
        rows = [row(4) for _ in range(choosing)]
        assert policy.choose_counts(rows) == [0] * choosing
