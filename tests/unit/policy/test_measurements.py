"""What is learned of steps, drafts and confidences, and which tokens and waits are worth it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.bounded import MAX_NAMES
from outrider.draft_port import DraftOffer
from outrider.draft_times import DraftTimes
from outrider.drafted_nodes import NO_NODES, DraftNodes
from outrider.policy.adaptive import AdaptivePolicy
from outrider.policy.measurements import Acceptance
from outrider.policy.row import CurrentRound, Drafting, Offered
from outrider.policy.waiting import Waiting
from outrider.rounds import UNDRAFTED, Round, chain_round
from outrider.step_times import StepSizes

# Seconds of steps by tokens: of a 62 M model, and of one whose every token takes as long.
STEP_S = {1: 0.0075, 4: 0.0078, 8: 0.0089, 16: 0.0110, 64: 0.0260, 640: 0.2}
EVEN_STEP_S = {n: 0.004 + 0.001 * n for n in (1, 2, 4, 8, 16, 64)}
SURE, UNSURE = 200, 90
TRUE_SHARE = {SURE: 0.95, UNSURE: 0.3}


def row(k: int = 4, *, sampled: bool = False, proposer: str = "a") -> Drafting:
    return Drafting(Offered(k, sampled, DraftOffer(proposer, k)), drafter=proposer)


def rows(num: int, k: int = 4) -> list[Drafting]:
    return [row(k) for _ in range(num)]


def met(acceptance: Acceptance, times: int, *rounds: tuple[Drafting, Round]) -> None:
    for _ in range(times):
        acceptance.observe([(each, round_, NO_NODES) for each, round_ in rounds])


def policy_after(
    *rounds: tuple[Drafting, Round], step_s: Mapping[int, float] | None = None, num_rows: int = 1
) -> AdaptivePolicy:
    policy = AdaptivePolicy(16)
    for _ in range(50):
        for each in rounds:
            met(policy.measured.acceptance, 1, each)
    for num_tokens, seconds in (step_s or {}).items():
        policy.measured.steps.observe_step(num_rows, num_tokens, seconds)
    return policy


def test_drafts_grow_with_acceptance_and_shrink_with_load() -> None:
    rounds = [chain_round(8, accepted) for accepted in (0, 1, 3, 8)]

    def count(num_rows: int, *met: Round) -> int:
        all_rows = rows(num_rows, 8)
        each = itertools.product(all_rows, met)
        policy = policy_after(*each, step_s=STEP_S, num_rows=num_rows)
        return policy.choose_counts(all_rows)[0]

    by_agreement = [count(1, each) for each in rounds]
    assert by_agreement == sorted(by_agreement)
    assert (by_agreement[0], by_agreement[-1]) == (0, 8)
    by_rows = [count(n, *rounds) for n in (1, 4, 16, 64)]
    assert by_rows == sorted(by_rows, reverse=True)
    assert by_rows[0] > by_rows[-1]


def test_rows_share_a_step_by_what_their_drafts_meet() -> None:
    """Every token has the same price, so those of the row whose drafts come true are bought."""
    good, poor = rows(2, 8)
    met = (good, chain_round(8, 8)), (poor, chain_round(8, 0))
    policy = policy_after(*met, step_s=EVEN_STEP_S, num_rows=2)
    assert policy.choose_counts([good, poor]) == [8, 0]


@pytest.mark.parametrize(("depth", "expected"), [(9, 9), (3, 0)])
def test_of_a_tree_the_levels_are_gained_and_the_nodes_are_paid_for(
    depth: int, expected: int
) -> None:
    """All levels come true."""
    each, steps = row(9), {n: 0.002 + 0.002 * n for n in (1, 2, 4, 8, 16)}
    policy = policy_after((each, Round(9, depth, depth, rejected=False)), step_s=steps)
    assert policy.choose_counts([each]) == [expected]


@pytest.mark.parametrize(("token_s", "expected"), [(0.0, 12), (0.002, 1)])
def test_tokens_that_take_long_to_draft_are_not_asked_for(token_s: float, expected: int) -> None:
    """A step waits for the drafts, which take that long."""
    each = row(12)
    policy = policy_after((each, chain_round(2, 1)), step_s={1: 0.0048, 13: 0.0048})
    times = policy.measured.draft_times(each)
    times.observe(0.0, 0.001 + 4 * token_s, 4 * token_s, 4, alone=True)
    assert policy.choose_counts([each]) == [expected]


def test_a_row_that_drafts_nothing_comes_back_to_its_proposers_acceptance() -> None:
    acceptance, poor, others = Acceptance(), row(), row()
    met(acceptance, 100, (others, chain_round(4, 4)))
    met(acceptance, 8, (poor, chain_round(4, 0)))
    before = acceptance.survivals([poor, others], 1)
    met(acceptance, 64, (poor, UNDRAFTED))
    after = acceptance.survivals([poor, others], 1)
    assert before[0] < 0.7 * before[1]
    assert after[0] == pytest.approx(after[1], rel=0.1)


def test_acceptance_differs_by_depth_and_by_kind_of_text() -> None:
    acceptance = Acceptance()
    met(acceptance, 100, (row(), chain_round(4, 2)))
    met(acceptance, 100, (row(sampled=True), chain_round(4, 0)))
    first, second, third, _ = acceptance.survivals([row()], 4)[0]
    assert first > second > 0.9
    assert third < 0.1
    assert acceptance.survivals([row(sampled=True)], 1)[0] < 0.1


def test_proposers_of_ever_new_names_do_not_fill_the_memory() -> None:
    measured = AdaptivePolicy(4).measured
    for i in range(MAX_NAMES + 20):
        met(measured.acceptance, 1, (each := row(proposer=f"p{i}"), chain_round(4, 1)))
        measured.draft_times(each)
    assert len(measured.acceptance._kinds) == len(measured._drafts) == MAX_NAMES


def test_drafts_fill_the_captured_size_that_pays_and_begin_no_other() -> None:
    """All tokens of a size cost the same, so it is filled; one token more costs the next size."""
    sizes = (1, 1), (8, 8), (1, 5), (8, 40), (32, 32), (32, 64), (32, 96), (32, 160)
    policy, each = AdaptivePolicy(4), rows(20)
    steps = policy.measured.steps
    steps.sizes = StepSizes(sizes)
    for size in sizes:
        steps.observe_step(*size, 0.010 + 0.0001 * size[1])
    steps.observe_step(20, 20, 0.0132)
    for accepted in (4, 3, 0, 1, 0, 4, 0, 0) * 20:
        met(policy.measured.acceptance, 1, *((row, chain_round(4, accepted)) for row in each))
    assert 20 + sum(policy.choose_counts(each)) in {64, 96}
    # A step of 70 tokens took as long as its size does.
    before = steps.estimate(96)
    steps.observe_step(32, 70, 0.005)
    assert steps.estimate(96) < before


@pytest.mark.parametrize("num_rows", [8, 100])
def test_a_step_without_drafts_is_priced_by_its_own_size(num_rows: int) -> None:
    """Though only a few of its rows choose: a fraction more would be the next size."""
    policy, plain = AdaptivePolicy(4), (num_rows, num_rows)
    steps, dear = policy.measured.steps, ((num_rows, 2 * num_rows), (128, 640))
    steps.sizes = StepSizes([plain, *dear])
    for size, seconds in ((dear[0], 0.1), (dear[1], 0.2), (plain, 0.010)):
        steps.observe_step(*size, seconds)
    for choosing in range(1, num_rows + 1):
        assert policy.choose_counts(rows(choosing)) == [0] * choosing


@pytest.mark.parametrize(
    ("drafts", "mean_s", "contention_s"),
    [
        ([(1, 0.020, 0.001, False)], 0.020, 0.5),
        (
            [(1, 0.020, 0.001, False), (1, 0.004, 0.001, True), (99, 0.02, 0.001, False)],
            4e-3,
            16e-3,
        ),
        ([(1, 1.0, 0.001, True), (20, 0.006, 0.002, False)], 0.006, 0.5),
        ([(1, 0.005, 0.001, False), (20, 0.006, 0.002, True)], 0.006, 0.5),
    ],
    ids=["no others", "others alone", "faster beside steps", "slower alone"],
)
def test_drafts_beside_steps_count_where_there_are_no_others_or_those_are_outdated(
    drafts: list[tuple[int, float, float, bool]], mean_s: float, contention_s: float
) -> None:
    """Rows that do not wait have no others; 32 rows in one step have none beside steps again."""
    times, at = DraftTimes(), itertools.count()
    for num, seconds, draft_s, alone in drafts:
        for _ in range(num):
            times.observe(next(at), seconds, draft_s, 4, alone=alone)
    assert times.delays.mean_s(4) == pytest.approx(mean_s)
    assert times.contention_s(4, 0.5) == pytest.approx(contention_s, rel=0.1)


SECONDS = st.floats(0.0, 1e4)


@given(st.lists(st.tuples(SECONDS, SECONDS, st.integers(0, 128), st.booleans()), max_size=30))
def test_delays_are_numbers_and_not_negative_whatever_is_measured(
    answers: list[tuple[float, float, int, bool]],
) -> None:
    times = DraftTimes()
    for at, (seconds, draft_s, num_tokens, alone) in enumerate(answers):
        times.observe(at, seconds, draft_s, num_tokens, alone=alone)
        delays = times.delays
        for k in (0, 1, 128):
            late_s = times.contention_s(k, 0.0)
            found = (delays.mean_s(k), delays.most_s(k), late_s, delays.token_s)
            assert all(0.0 <= each < float("inf") for each in found)


def told_confidences(*, honest: bool) -> AdaptivePolicy:
    """A policy after drafts of one token each, with an honest or a random confidence."""
    policy, rng, each = policy_after(step_s=EVEN_STEP_S, num_rows=4), random.Random(1), row()
    for _ in range(600):
        told = rng.choice((SURE, UNSURE))
        meant = told if honest else rng.choice((SURE, UNSURE))
        round_ = chain_round(1, int(rng.random() < TRUE_SHARE[meant]))
        policy.measured.acceptance.observe([(each, round_, DraftNodes(bytes([told])))])
    return policy


def test_cut_verifies_the_sure_tokens_of_all_rows() -> None:
    told = [bytes((SURE, SURE)), bytes((UNSURE, SURE)), bytes((SURE, UNSURE)), bytes((UNSURE,))]
    drafts, policy = [(row(), DraftNodes(each)) for each in told], told_confidences(honest=True)
    assert policy.cut(drafts, 4, 4) == [True, True, False, False, True, False, False]


def test_confidences_of_a_liar_come_to_mean_its_usual_acceptance() -> None:
    acceptance = told_confidences(honest=False).measured.acceptance
    drafts = DraftNodes(bytes((SURE, UNSURE))), DraftNodes(bytes((UNSURE, SURE)))
    told = acceptance.survivals_of_nodes([(row(), nodes) for nodes in drafts])
    np.testing.assert_allclose(told[::2], sum(TRUE_SHARE.values()) / 2, atol=0.12)


def test_confidence_that_was_never_tried_is_believed_whatever_siblings_met() -> None:
    """Most nodes of a tree fail, so their mean says nothing of a sure one."""
    policy, siblings = policy_after(step_s=EVEN_STEP_S, num_rows=1), bytes([UNSURE] * 3)
    for _ in range(20):
        failed = row(), Round(3, 1, 0, rejected=True), DraftNodes(siblings, (-1, -1, -1))
        policy.measured.acceptance.observe([failed])
    for told, kept in ((SURE, True), (UNSURE, False)):
        assert policy.cut([(row(), DraftNodes(bytes([told])))], 1, 1) == [kept]


@pytest.mark.parametrize(
    ("alone_s", "beside_s"), [(0.004, None), (None, 0.006), (0.004, 0.0039), (0.004, 0.0041)]
)
@pytest.mark.parametrize(
    ("num_ready", "now", "least", "most"),
    [(31, 0.05, 0.05, 0.05), (31, 0.001, 0.0035, 0.0065), (1, 0.001, 0.0035, 0.0065)],
    ids=["for one that is overdue", "for one that comes soon", "for many"],
)
def test_ready_rows_wait_for_drafts_that_come_soon(
    alone_s: float | None,
    beside_s: float | None,
    num_ready: int,
    now: float,
    least: float,
    most: float,
) -> None:
    """Seconds of drafts, alone and beside steps, and when the ready ones of 32 rows start."""
    policy, at = policy_after(), itertools.count()
    for tokens, seconds in ((1, 0.010), (32, 0.012), (160, 0.020)):
        policy.measured.steps.observe_step(min(tokens, 32), tokens, seconds)
    each: list[Any] = [SimpleNamespace(drafting=row()) for _ in range(32)]
    for one in each:
        one.drafting.num_draft_tokens = 4
        one.drafting.round = CurrentRound(deadline=0.110)
    times = policy.measured.draft_times(row())
    for delay_s in (alone_s, beside_s) * 20:
        if delay_s is not None:
            times.observe(next(at), delay_s, delay_s, 4, alone=delay_s == alone_s)
    start_at = Waiting(policy.measured).start_at(each[:num_ready], each[num_ready:], 0, now)
    assert least <= start_at <= most


def test_drafts_under_rules_that_cut_none_are_counted_although_others_told_confidences() -> None:
    """No draft comes true, and those under rejection are verified whole."""
    policy = policy_after(step_s=EVEN_STEP_S, num_rows=2)
    both, told = rows(2, 12), DraftNodes(bytes([100] * 12))
    for _ in range(60):
        rounds = zip(both, (told, NO_NODES), strict=True)
        policy.measured.acceptance.observe([(d, chain_round(12, 0), nodes) for d, nodes in rounds])
    assert not policy.measured.acceptance.confident(both)
    assert max(policy.choose_counts(both)) <= 1
