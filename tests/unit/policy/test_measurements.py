"""What is learned of steps, drafts and confidences, and which tokens and waits are worth it."""

from __future__ import annotations

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
from outrider.draft_tree import chain_parents
from outrider.drafted_nodes import NO_NODES, DraftNodes
from outrider.policy.adaptive import AdaptivePolicy
from outrider.policy.base import StepDone
from outrider.policy.draft_times import Delays, DraftTimes
from outrider.policy.measurements import Acceptance
from outrider.policy.row import CurrentRound, Drafting, Offered
from outrider.policy.waiting import Waiting
from outrider.rounds import UNDRAFTED, Round, chain_round
from outrider.step_times import StepSizes

EVEN_STEP_S = {n: 0.004 + 0.001 * n for n in (1, 2, 4, 8, 16, 64)}  # of steps by their tokens
DEAR_STEP_S = {n: 0.002 + 0.002 * n for n in (1, 2, 4, 8, 16)}
SURE, UNSURE = 200, 90
TRUE_SHARE = {SURE: 0.95, UNSURE: 0.3}


def row(k: int = 4, *, sampled: bool = False, proposer: str = "a") -> Drafting:
    return Drafting(Offered(k, sampled, DraftOffer(proposer, k)), drafter=proposer)


def rows(num: int, k: int = 4) -> list[Drafting]:
    return [row(k) for _ in range(num)]


def met(acceptance: Acceptance, times: int, *rounds: tuple[Drafting, Round]) -> None:
    for _ in range(times):
        acceptance.observe([(each, [(round_, NO_NODES)]) for each, round_ in rounds])


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


# Rounds of rows, seconds of steps by tokens and of a token to be drafted, and the next drafts.
COUNTS: dict[str, tuple[list[Round], dict[int, float], float, list[int]]] = {
    "those of the better row": ([chain_round(8, 8), chain_round(8, 0)], EVEN_STEP_S, 0.0, [12, 0]),
    "a chain": ([chain_round(9, 9)], DEAR_STEP_S, 0.0, [12]),
    "a tree, of which the levels are gained": ([Round(9, 3, 3, False)], DEAR_STEP_S, 0.0, [1]),
    "drafted at once": ([chain_round(2, 1)], {1: 0.0048, 13: 0.0048}, 0.0, [12]),
    "drafted for long, while the step waits": ([chain_round(2, 1)], {1: 0.0048}, 0.002, [1]),
}


@pytest.mark.parametrize(("met", "step_s", "token_s", "expected"), COUNTS.values(), ids=COUNTS)
def test_tokens_that_bring_more_than_their_time_are_drafted(
    met: list[Round], step_s: dict[int, float], token_s: float, expected: list[int]
) -> None:
    all_rows = rows(len(met), 12)
    policy = policy_after(*zip(all_rows, met, strict=True), step_s=step_s, num_rows=len(met))
    times = policy.measured.draft_times(all_rows[0])
    times.observe(0.0, 0.001 + 4 * token_s, 4 * token_s, 4, alone=True)
    assert policy.choose_counts(all_rows) == expected


def test_short_drafts_of_all_rows_are_chosen_before_long_ones_that_all_rows_wait_for() -> None:
    """Though the last tokens of some rows are likelier than the first ones of others."""
    both = [*rows(4, 8), *[row(8, sampled=True) for _ in range(4)]]
    met = [(each, chain_round(8, 1 if each.offered.sampled else 4)) for each in both]
    policy = policy_after(*met, step_s={8: 0.0048, 80: 0.0048}, num_rows=8)
    policy.measured.draft_times(both[0]).observe(0.0, 0.012, 0.012, 4, alone=True)
    assert policy.choose_counts(both) == [1] * 8


def test_delay_of_a_proposer_that_no_row_waits_for_is_no_price_of_others_tokens() -> None:
    near, far = rows(31), row(proposer="b")
    met = [(each, chain_round(4, i % 3)) for i, each in enumerate([*near, far])]
    policy = policy_after(*met, step_s={32: 0.0052, 160: 0.0063, 320: 0.0097}, num_rows=32)
    for each, delay_s in ((near[0], 0.003), (far, 0.3)):
        policy.measured.draft_times(each).observe(0.0, delay_s, 0.002, 4, alone=True)
    alone = policy.choose_counts(near)
    assert 0 < max(alone) < 4
    far.measured.worth_waiting = False
    assert policy.choose_counts([*near, far])[:-1] == alone


def test_rows_of_two_proposers_are_chosen_for_by_the_later_draft() -> None:
    """As one step waits for both."""
    both, step_s = [row(12), row(12, proposer="b")], {2: 0.0048}
    policy = policy_after(*[(d, chain_round(2, 1)) for d in both], step_s=step_s, num_rows=2)
    for each, token_s in zip(both, (0.0, 0.002), strict=True):
        policy.measured.draft_times(each).observe(
            0.0, 0.001 + 4 * token_s, 4 * token_s, 4, alone=True
        )
    assert policy.choose_counts(both) == [1, 1]


def test_acceptance_is_that_of_depth_and_kind_of_text_and_a_rows_own_while_it_drafts() -> None:
    acceptance, sampled = Acceptance(), row(sampled=True)
    poor, others = row(proposer="b"), row(proposer="b")
    met(acceptance, 100, (row(), chain_round(4, 2)))
    met(acceptance, 100, (sampled, chain_round(4, 0)))
    first, second, third, _ = acceptance.survivals([row()], 4)[0]
    assert first > second > 0.9
    assert third < 0.1
    assert acceptance.survivals([sampled], 1)[0] < 0.1
    met(acceptance, 100, (others, chain_round(4, 4)))
    met(acceptance, 8, (poor, chain_round(4, 0)))
    before = acceptance.survivals([poor, others], 1)
    met(acceptance, 64, (poor, UNDRAFTED))
    after = acceptance.survivals([poor, others], 1)
    assert before[0] < 0.7 * before[1]
    assert after[0] == pytest.approx(after[1], rel=0.1)
    met(acceptance, 200, (others, chain_round(4, 0)))
    assert acceptance.survivals([row(proposer="b")], 1)[0] < 0.2, "what they met before has faded"


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
    assert policy.choose_counts([row(2), row(8)]) == [2, 8], "all are tried while nothing is known"
    policy.measured.steps.sizes = StepSizes(sizes)
    for size in sizes:
        policy.measured.steps.observe_step(*size, 0.010 + 0.0001 * size[1])
    policy.measured.steps.observe_step(20, 20, 0.0132)
    for accepted in (4, 3, 0, 1, 0, 4, 0, 0) * 20:
        met(policy.measured.acceptance, 1, *((row, chain_round(4, accepted)) for row in each))
    assert 20 + sum(policy.choose_counts(each)) in {64, 96}
    # A step of 70 tokens took as long as its size does.
    before = policy.measured.steps.estimate(96)
    policy.measured.steps.observe_step(32, 70, 0.005)
    assert policy.measured.steps.estimate(96) < before


# Drafts, as numbers of like ones with their delay, alone or beside steps; and the delay and the
# contention that follow from them.
DELAYS: dict[str, tuple[list[tuple[int, float, bool]], float, float]] = {
    "no others": ([(1, 0.020, False)], 0.020, 0.001),
    "others alone": ([(1, 0.02, False), (1, 4e-3, True), (99, 0.02, False)], 4e-3, 0.016),
    "faster beside steps": ([(1, 1.0, True), (20, 0.006, False)], 0.006, 0.001),
    "slower alone": ([(1, 0.005, False), (20, 0.006, True)], 0.006, 0.001),
}


@pytest.mark.parametrize(("drafts", "mean_s", "contention_s"), DELAYS.values(), ids=DELAYS)
def test_drafts_beside_steps_count_where_there_are_no_others_or_those_are_outdated(
    drafts: list[tuple[int, float, bool]], mean_s: float, contention_s: float
) -> None:
    """Rows that do not wait have no others; 32 rows in one step have none beside steps again."""
    times, each = DraftTimes(), [draft for num, *draft in drafts for _ in range(num)]
    for at, (seconds, alone) in enumerate(each):
        times.observe(at, seconds, 0.001, 4, alone=alone)
    assert times.delays.mean_s(4) == pytest.approx(mean_s)
    assert times.contention_s(4) == pytest.approx(contention_s, rel=0.1)


def test_answers_without_a_draft_keep_none_of_their_batch_from_being_measured() -> None:
    times = DraftTimes()
    for num_tokens in (0, 4, 2):
        times.observe(1.0, 0.01, 0.01, num_tokens, alone=True)
    assert times.delays.tokens.mean == 4.0, "the first draft counts"


UNLIKE, ALIKE = [(n, 0.002 + 0.001 * n) for n in (6, 8)] * 10, [(8, 0.010)] * 30
# Drafts, as tokens and seconds; and the seconds of so many tokens after them.
TOLD: dict[str, tuple[list[tuple[int, float]], int, float]] = {
    "a draft took a second": ([*UNLIKE, (4, 1.0), *ALIKE], 16, 0.018),
    "a draft came at once": ([*UNLIKE, (12, 0.0001), *ALIKE], 16, 0.018),
    "more rows, and shorter drafts": ([(8, 0.01)] * 20 + [(4, 0.02)] * 400, 8, 0.04),
}


@pytest.mark.parametrize(("drafts", "num_tokens", "seconds"), TOLD.values(), ids=TOLD)
def test_neither_accidents_nor_other_loads_tell_what_tokens_take(
    drafts: list[tuple[int, float]], num_tokens: int, seconds: float
) -> None:
    delays = Delays()
    for n, took_s in drafts:
        delays.add(took_s, took_s, n)
    assert delays.mean_s(num_tokens) == pytest.approx(seconds, rel=0.05)


SECONDS = st.floats(0.0, 1e4)


@given(st.lists(st.tuples(SECONDS, SECONDS, st.integers(0, 128), st.booleans()), max_size=30))
def test_delays_are_numbers_and_not_negative_whatever_is_measured(
    answers: list[tuple[float, float, int, bool]],
) -> None:
    times = DraftTimes()
    for at, (seconds, draft_s, num_tokens, alone) in enumerate(answers):
        times.observe(at, seconds, draft_s, num_tokens, alone=alone)
        for k in (0, 1, 128):
            found = times.delays.mean_s(k), times.delays.most_s(k), times.contention_s(k)
            assert all(0.0 <= each < float("inf") for each in found)


def told_confidences(*, honest: bool) -> AdaptivePolicy:
    """A policy after drafts of one token each, with an honest or a random confidence."""
    policy, rng, each = policy_after(step_s=EVEN_STEP_S, num_rows=4), random.Random(1), row()
    for _ in range(600):
        told = rng.choice((SURE, UNSURE))
        meant = told if honest else rng.choice((SURE, UNSURE))
        round_ = chain_round(1, int(rng.random() < TRUE_SHARE[meant]))
        policy.measured.acceptance.observe([(each, [(round_, DraftNodes(bytes([told])))])])
    return policy


@pytest.mark.parametrize("waited_s", [0.0, 0.1])
def test_cut_verifies_sure_tokens_of_all_rows_and_all_after_a_long_wait(waited_s: float) -> None:
    told = [bytes((SURE, SURE)), bytes((UNSURE, SURE)), bytes((SURE, UNSURE)), bytes((UNSURE,))]
    drafts, policy = [(row(), DraftNodes(each)) for each in told], told_confidences(honest=True)
    for d, nodes in drafts:
        d.num_draft_tokens = len(nodes.confidences)
        policy.measured.draft_times(d).observe(0.0, waited_s, 0.0, 2, alone=True)
    sure = [True, True, False, False, True, False, False]
    assert policy.cut(drafts, 4, 4) == (sure if waited_s == 0.0 else [True] * 7)
    far = row(proposer="b")
    policy.measured.draft_times(far).observe(0.0, 0.1, 0.0, 2, alone=True)
    far.measured.worth_waiting = False
    cut = policy.cut([*drafts, (far, DraftNodes(bytes((UNSURE,))))], 5, 5)
    assert cut[:7] == (sure if waited_s == 0.0 else [True] * 7), "nobody waits for it"
    policy.measured.steps.padded = True
    assert all(policy.cut(drafts, 4, 4)), "shorter drafts save nothing"
    assert all(AdaptivePolicy(4).cut(drafts, 4, 4)), "nothing is known"


def test_confidences_of_a_liar_come_to_mean_its_usual_acceptance() -> None:
    acceptance = told_confidences(honest=False).measured.acceptance
    drafts = DraftNodes(bytes((SURE, UNSURE))), DraftNodes(bytes((UNSURE, SURE)))
    told = acceptance.survivals_of_nodes([(row(), nodes) for nodes in drafts])
    np.testing.assert_allclose(told[::2], sum(TRUE_SHARE.values()) / 2, atol=0.12)


def test_confidence_that_is_not_tried_again_is_not_forgotten() -> None:
    """It would be tried for that alone, again and again."""
    acceptance = told_confidences(honest=True).measured.acceptance
    unsure = [(row(), DraftNodes(bytes([UNSURE])))]
    [before] = acceptance.survivals_of_nodes(unsure)
    for _ in range(1000):
        acceptance.observe([(row(), [(chain_round(1, 1), DraftNodes(bytes([SURE])))])])
    assert acceptance.survivals_of_nodes(unsure) == [pytest.approx(before, abs=0.02)]


def test_confidence_that_was_never_tried_is_believed_whatever_siblings_met() -> None:
    """Most nodes of a tree fail, so their mean says nothing of a sure one."""
    policy, siblings = policy_after(step_s=EVEN_STEP_S, num_rows=1), bytes([UNSURE] * 3)
    for _ in range(20):
        failed = Round(3, 1, 0, rejected=True), DraftNodes(siblings, (-1, -1, -1))
        policy.measured.acceptance.observe([(row(), [failed])])
    for told, kept in ((SURE, True), (UNSURE, False)):
        assert policy.cut([(row(), DraftNodes(bytes([told])))], 1, 1) == [kept]


def waiting_rows(deadlines: list[float], *, runs_ahead: bool = False) -> list[Any]:
    offered = Offered(4, proposer=DraftOffer("a", 4, runs_ahead=runs_ahead, own_device=runs_ahead))
    rounds = [CurrentRound(deadline=deadline) for deadline in deadlines]
    each = [Drafting(offered, 4, runs_ahead, "a", round=round_) for round_ in rounds]
    return [SimpleNamespace(drafting=d, draft=None) for d in each]


@pytest.mark.parametrize("beside_s", [None, 0.0039, 0.0041])
@pytest.mark.parametrize(("now", "num_ready"), [(0.050, 31), (0.001, 31), (0.001, 1)])
def test_ready_rows_wait_for_drafts_that_come_soon(
    beside_s: float | None, now: float, num_ready: int
) -> None:
    """Drafts take 4 ms alone, and so long beside steps. At 50 ms they are overdue."""
    measured = policy_after(step_s={32: 0.012, 160: 0.020}, num_rows=32).measured
    each, times = waiting_rows([0.11] * 32), measured.draft_times(row())
    for at, delay_s in enumerate((0.004, beside_s) * 20):
        if delay_s is not None:
            times.observe(at, delay_s, delay_s, 4, alone=delay_s == 0.004)
    start_at = Waiting(measured, 4).start_at(each[:num_ready], each[num_ready:], 0, now)
    assert start_at == now if now > 0.01 else 0.0035 <= start_at <= 0.0065


# Seconds of a step of a row's five tokens and of its drafts; its share of free drafts after a miss;
# and its patience, as usual and while it is unknown what drafts take.
PATIENCE: dict[str, tuple[float, float, float, float, float]] = {
    "until drafts have come": (0.02, 0.005, 0.0, 0.005, 0.06),
    "drafts bring two tokens for two steps": (0.02, 0.039, 0.0, 0.039, 0.06),
    "the next one is free": (0.02, 0.039, 1.0, 0.0, 0.06),
    "drafts come later in any case": (0.02, 0.061, 0.0, 0.0, 0.0),
    "a text stands still no longer": (0.5, 0.24, 0.0, 0.24, 0.25),
    "drafts come later than that": (0.5, 0.26, 0.0, 0.0, 0.0),
}


@pytest.mark.parametrize(
    ("step_s", "delay_s", "free", "usual", "unknown"), PATIENCE.values(), ids=PATIENCE
)
def test_row_waits_as_long_as_its_draft_pays_and_not_in_vain(
    step_s: float, delay_s: float, free: float, usual: float, unknown: float
) -> None:
    measured, each = policy_after(step_s={1: step_s, 5: step_s}).measured, waiting_rows([0.0])[0]
    d = each.drafting
    for at in range(60):
        measured.draft_times(d).observe(at, delay_s, 0.0, 4, alone=True)
    d.measured.gain, d.awaited.blocks, d.measured.free_after_miss.mean = 2.0, 1, free
    waiting = Waiting(measured, 4)
    assert waiting.patience_s(each, 1, unknown=False) == pytest.approx(usual, rel=0.01)
    assert waiting.patience_s(each, 1, unknown=True) == pytest.approx(unknown)


def test_wait_for_a_first_block_is_as_long_as_the_rows_part_of_the_prompts() -> None:
    measured, each = policy_after(step_s={1: 0.02, 5: 0.02}).measured, waiting_rows([0.0])[0]
    each.counters = SimpleNamespace(prefill_s=0.08)
    assert Waiting(measured, 4).patience_s(each, 8, unknown=False) == pytest.approx(0.07)
    measured.draft_times(each.drafting).observe(0.0, 0.08, 0.0, 4, alone=True)
    patience_s = Waiting(measured, 4).patience_s(each, 8, unknown=False)
    assert patience_s == 0.0, "it takes no less than later ones"


@pytest.mark.parametrize(("gain", "wake_at"), [(0.5, 0.0), (10.0, 0.004)])
def test_rows_together_wait_only_for_more_tokens_than_all_commit_meanwhile(
    gain: float, wake_at: float
) -> None:
    """These 32 rows commit 6.4 tokens in the 4 ms that the missing draft takes."""
    policy, each = (
        policy_after(step_s={32: 0.02, 544: 0.02}, num_rows=32),
        waiting_rows([0.1] * 32, runs_ahead=True),
    )
    policy.measured.draft_times(each[0].drafting).observe(0.0, 0.004, 0.0, 4, alone=True)
    each[0].drafting.measured.gain = gain
    found = policy.choose_rows(each[1:], each[:1], 0, now=0.0)
    assert (len(found.rows), found.wake_at) == (0 if wake_at else 32, pytest.approx(wake_at))


@pytest.mark.parametrize(
    ("beside_s", "now", "start_at"),
    [(0.004, 0.0, 0.0), (0.008, 0.0, 0.004), (0.004, 0.005, 0.005), (0.008, 0.005, 0.009)],
)
def test_rows_wait_for_drafts_that_a_step_beside_them_would_make_late(
    beside_s: float, now: float, start_at: float
) -> None:
    """Half of the rows take 5.5 ms and then again; or all of them 8, after a wait of 4.

    After 5 ms the drafts are overdue, and awaited for 4 more at most.
    """
    measured = policy_after(step_s={80: 0.0055, 160: 0.008}, num_rows=32).measured
    each, times = waiting_rows([0.009] * 32), measured.draft_times(row())
    for at in range(40):
        times.observe(at, beside_s if at % 2 else 0.004, 0.004, 4, alone=at % 2 == 0)
    found = Waiting(measured, 4).start_at(each[:16], each[16:], 0, now)
    assert found == pytest.approx(start_at)


@pytest.mark.parametrize("hidden", ["by others' steps", "ahead"])
def test_time_of_drafts_that_nothing_waits_for_is_no_price_of_their_tokens(hidden: str) -> None:
    policy, each = policy_after((d := row(12), chain_round(2, 1)), step_s={1: 0.0048}), [d]
    policy.measured.draft_times(d).observe(0.0, 0.009, 0.008, 4, alone=True)
    assert policy.choose_counts(each) == [1]
    if hidden == "ahead":
        d.measured.free_hits.mean = 1.0
    else:
        policy.step_done(StepDone(8, 1, 1, 0.0, 0, comparable=False))
    assert policy.choose_counts(each)[0] > 1


def test_longer_drafts_in_vain_are_tried_in_few_steps() -> None:
    policy, tried = policy_after(step_s=EVEN_STEP_S), 0
    for i in range(4000):
        policy.step_done(
            StepDone(1, 1, 1, float(i), 0, comparable=False, proposer_ids=frozenset("a"))
        )
        tried += policy._unknown
    assert 0 < tried < 0.05 * 4000


def test_row_whose_patience_ends_is_asked_about_though_all_wait() -> None:
    policy = policy_after(step_s={2: 0.008, 10: 0.009}, num_rows=2)
    both = waiting_rows([0.005, 0.25], runs_ahead=True)
    found = policy.choose_rows([], both, 0, now=0.0)
    assert (found.rows, found.wake_at) == ([], 0.005)
    assert len(policy.choose_rows(both[:1], both[1:], 0, now=0.005).rows) == 2


@given(st.binary(max_size=12), st.integers(1, 4), st.integers(1, 20), st.booleans(), st.booleans())
def test_cut_of_a_chain_is_that_of_a_tree_with_one_path(
    told: bytes, num_rows: int, num_others: int, dear: bool, captured: bool
) -> None:
    policy = policy_after(step_s=DEAR_STEP_S if dear else EVEN_STEP_S, num_rows=num_rows)
    each, chain, path = row(12), DraftNodes(told), DraftNodes(told, chain_parents(len(told)))
    policy.measured.steps.sizes = StepSizes(((1, 5), (4, 8), (4, 20)) if captured else ())
    policy.measured.draft_times(each).observe(0.0, 0.01, 0.0, 2, alone=True)
    verified = chain_round(12, 5), DraftNodes(bytes([99] * 12))
    policy.measured.acceptance.observe([(each, [verified])])
    cuts = [policy.cut([(each, nodes)], num_rows, num_others) for nodes in (chain, path)]
    assert cuts[0] == cuts[1]


def test_lone_drafts_of_any_lengths_are_cut_and_seldom_verified_whole() -> None:
    policy, each = policy_after((row(), chain_round(12, 12)), step_s=DEAR_STEP_S), row(12)
    told, whole = bytes([250, *[1] * 11]), 0
    for length in random.Random(1).choices(range(4, 10), k=200):
        assert policy.choose_counts([each])[0] >= 10, "longer drafts than come"
        cut = policy.cut([(each, DraftNodes(told[:length]))], 1, 1)
        policy.measured.steps.observe_step(1, 1 + sum(cut), 0.004 + 0.002 * sum(cut))
        whole += all(cut)
    assert 0 < whole < 30
    assert not all(policy.cut([(each, DraftNodes(told))] * 2, 2, 2)), "neither is alone"


@pytest.mark.parametrize("told", [b"", bytes([250] * 4)])
@pytest.mark.parametrize(("longer_s", "tries"), [(0.02, range(155, 161)), (0.08, range(1, 20))])
def test_lone_row_verifies_longer_drafts_after_other_work_made_such_steps_slow(
    longer_s: float, tries: range, told: bytes
) -> None:
    """Such steps have 5 tokens. What slowed them would be believed for good, as none runs then."""
    as_fast = {1: 0.02, 4: 0.02, 5: 0.02}
    policy, each = policy_after((row(), chain_round(4, 4)), step_s=as_fast), row()
    counts: list[int] = []
    for i in range(200):
        [count] = policy.choose_counts([each])
        if told:
            count = sum(policy.cut([(each, DraftNodes(told[:count]))], 1, 1))
        counts.append(count)
        whole_s = 0.08 if i <= 20 else longer_s
        policy.measured.steps.observe_step(1, 1 + count, whole_s if count == 4 else 0.02)
        if i == 20:  # a text's last tokens run without other work
            policy.measured.steps.observe_step(1, 4, 0.02)
    assert counts[21:25] == [3] * 4, "what ran last is believed"
    assert counts[40:].count(4) in tries
