"""What is learned of steps, drafts and confidences, and which tokens and waits are worth it."""

from __future__ import annotations

import random
from functools import partial
from itertools import cycle
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.bounded import MAX_NAMES
from outrider.draft_port import DraftOffer
from outrider.drafted_nodes import NO_NODES, DraftNodes
from outrider.policy.adaptive import AdaptivePolicy
from outrider.policy.base import StepDone
from outrider.policy.draft_times import DraftTimes
from outrider.policy.measurements import Acceptance
from outrider.policy.row import Drafting, Offered
from outrider.policy.waiting import Waiting
from outrider.rounds import UNDRAFTED, Round, chain_round
from outrider.step_times import StepSizes

EVEN_STEP_S = {n: 0.004 + 0.001 * n for n in (1, 2, 4, 8, 16, 64)}  # of steps by their tokens
DEAR_STEP_S = {n: 0.002 + 0.002 * n for n in (1, 2, 4, 8, 16)}
FLAT_STEP_S = dict.fromkeys((1, 80), 0.0048)
SLOW, FAST = {32: 0.012, 160: 0.020}, {80: 0.0055, 160: 0.008}
SECONDS = st.floats(0.0, 1e4)
SURE, UNSURE = 200, 90
TRUE_SHARE = {SURE: 0.95, UNSURE: 0.3}
Met = tuple[Drafting, Round]


def row(k: int = 4, name: str = "a", *, sampled: bool = False, ahead: bool = False) -> Drafting:
    offer = DraftOffer(name, k, runs_ahead=ahead, own_device=ahead)
    return Drafting(Offered(k, sampled, offer), k, ahead, drafter=name)


def met(acceptance: Acceptance, times: int, *rounds: Met) -> None:
    for _ in range(times):
        acceptance.observe([(each, [(round_, NO_NODES)]) for each, round_ in rounds])


def policy_after(*rounds: Met, step_s: dict[int, float], num_rows: int = 1) -> AdaptivePolicy:
    policy = AdaptivePolicy(16)
    met(policy.measured.acceptance, 50, *rounds)
    for num_tokens, seconds in step_s.items():
        policy.measured.steps.observe_step(max(num_rows, len(rounds)), num_tokens, seconds)
    return policy


def took(policy: AdaptivePolicy, seconds: float, draft_s: float = 0.0, name: str = "a") -> None:
    """Take in that four tokens came so late, of which drafting took `draft_s`."""
    times = policy.measured.draft_times(row(name=name))
    times.observe(0.0, seconds, draft_s, 4, alone=True)


MIXED_ROUNDS = [chain_round(8, 4), chain_round(8, 1)] * 4
# Rounds of rows; seconds of steps by tokens, and of a token to be drafted; and the next drafts.
COUNTS: dict[str, tuple[list[Round], dict[int, float], dict[str, float], list[int]]] = {
    "the better row's": ([chain_round(8, 8), chain_round(8, 0)], EVEN_STEP_S, {"a": 0.0}, [12, 0]),
    "a chain": ([chain_round(9, 9)], DEAR_STEP_S, {"a": 0.0}, [12]),
    "a tree, of which levels are gained": ([Round(9, 3, 3, False)], DEAR_STEP_S, {"a": 0.0}, [1]),
    "drafted at once": ([chain_round(2, 1)], FLAT_STEP_S, {"a": 0.0}, [12]),
    "after the later draft": ([chain_round(2, 1)] * 2, FLAT_STEP_S, {"a": 0.0, "b": 0.002}, [1, 1]),
    # Though the last tokens of some rows are likelier than the first ones of others.
    "short ones first": (MIXED_ROUNDS, FLAT_STEP_S, {"a": 0.003, "b": 0.003}, [1] * 8),
}


@pytest.mark.parametrize(("rounds", "step_s", "token_s", "counts"), COUNTS.values(), ids=COUNTS)
def test_tokens_that_bring_more_than_their_time_are_drafted(
    rounds: list[Round], step_s: dict[int, float], token_s: dict[str, float], counts: list[int]
) -> None:
    """A step waits for all its drafts. The rows' proposers take turns."""
    each = [row(12, name) for name, _ in zip(cycle(token_s), rounds)]
    policy = policy_after(*zip(each, rounds, strict=True), step_s=step_s)
    for name, drafted_s in token_s.items():
        took(policy, 0.001 + 4 * drafted_s, 4 * drafted_s, name)
    assert policy.choose_counts(each) == counts


def test_time_of_drafts_that_nothing_waits_for_is_no_price_of_their_tokens() -> None:
    policy = policy_after((d := row(12), chain_round(2, 1)), step_s=FLAT_STEP_S)
    took(policy, 0.009, 0.008)
    assert policy.choose_counts([d]) == [1]
    d.measured.free_hits.mean = 1.0
    assert policy.choose_counts([d])[0] > 1, "they are made ahead"
    d.measured.free_hits.mean = 0.0
    policy.step_done(StepDone(8, 1, 1, 0.0, 0, comparable=False))
    assert policy.choose_counts([d])[0] > 1, "other rows have steps meanwhile"


def test_acceptance_is_that_of_depth_and_kind_of_text_and_a_rows_own_while_it_drafts() -> None:
    acceptance, sampled = Acceptance(), row(sampled=True)
    poor, others = (row(name="b") for _ in range(2))
    met(acceptance, 100, (row(), chain_round(4, 2)), (sampled, chain_round(4, 0)))
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
    assert acceptance.survivals([row(name="b")], 1)[0] < 0.2, "what they met before has faded"


def test_proposers_of_ever_new_names_do_not_fill_the_memory() -> None:
    measured = AdaptivePolicy(4).measured
    for i in range(MAX_NAMES + 20):
        met(measured.acceptance, 1, (each := row(name=f"p{i}"), chain_round(4, 1)))
        measured.draft_times(each)
    assert len(measured.acceptance._kinds) == len(measured._drafts) == MAX_NAMES


def test_drafts_fill_the_captured_size_that_pays_and_begin_no_other() -> None:
    """All tokens of a size cost the same, so it is filled; one token more costs the next size."""
    sizes = (1, 1), (8, 8), (1, 5), (8, 40), (32, 32), (32, 64), (32, 96), (32, 160)
    policy, each = AdaptivePolicy(4), [row() for _ in range(20)]
    assert policy.choose_counts([row(2), row(8)]) == [2, 8], "all are tried while nothing is known"
    policy.measured.steps.sizes = StepSizes(sizes)
    for size in sizes:
        policy.measured.steps.observe_step(*size, 0.010 + 0.0001 * size[1])
    policy.measured.steps.observe_step(20, 20, 0.0132)
    for accepted in (4, 3, 0, 1, 0, 4, 0, 0) * 20:
        met(policy.measured.acceptance, 1, *((row, chain_round(4, accepted)) for row in each))
    assert 20 + sum(policy.choose_counts(each)) in {64, 96}
    before = policy.measured.steps.estimate(96)
    policy.measured.steps.observe_step(32, 70, 0.005)
    assert policy.measured.steps.estimate(96) < before, "a step of 70 tokens takes as long"


# Drafts: their seconds, those of drafting, their tokens, and whether no step ran beside them.
LATE, SOON, USUAL = (0.02, 0.001, 4, False), (0.004, 0.001, 4, True), (0.01, 0.01, 8, True)
UNLIKE = [(0.008, 0.008, 6, True), USUAL] * 10
# After them so many tokens take so long, and longer by so much beside a step.
DELAYS: dict[str, tuple[list[tuple[float, float, int, bool]], int, float, float]] = {
    "no others": ([LATE], 4, 0.020, 0.001),
    "others alone": ([LATE, SOON, *[LATE] * 99], 4, 0.004, 0.016),
    "faster beside steps": ([(1.0, 0.001, 4, True), *[LATE] * 20], 4, 0.020, 0.001),
    "slower alone": ([(0.003, 0.001, 4, False), *[SOON] * 20], 4, 0.004, 0.001),
    "a draft took a second": ([*UNLIKE, (1.0, 1.0, 4, True), *[USUAL] * 30], 16, 0.018, 0.018),
    "a draft came at once": ([*UNLIKE, (1e-4, 1e-4, 12, True), *[USUAL] * 30], 16, 0.018, 0.018),
    "more rows, and shorter drafts": ([USUAL] * 20 + [(0.02, 0.02, 4, True)] * 400, 8, 0.04, 0.04),
}


@pytest.mark.parametrize(("drafts", "tokens", "mean_s", "beside_s"), DELAYS.values(), ids=DELAYS)
def test_delays_are_those_alone_unless_outdated_and_tokens_take_what_no_accident_tells(
    drafts: list[tuple[float, float, int, bool]], tokens: int, mean_s: float, beside_s: float
) -> None:
    """Rows that do not wait have no others; 32 rows in one step have none beside steps again."""
    times = DraftTimes()
    for at, (*draft, alone) in enumerate(drafts):
        times.observe(at, *draft, alone=alone)
    assert times.delays.mean_s(tokens) == pytest.approx(mean_s, rel=0.05)
    assert times.contention_s(tokens) == pytest.approx(beside_s, rel=0.1)


def test_answers_without_a_draft_keep_none_of_their_batch_from_being_measured() -> None:
    times = DraftTimes()
    for num_tokens in (0, 4, 2):
        times.observe(1.0, 0.01, 0.01, num_tokens, alone=True)
    assert times.delays.tokens.mean == 4.0, "the first draft counts"


@given(st.lists(st.tuples(SECONDS, SECONDS, st.integers(0, 128), st.booleans()), max_size=30))
def test_delays_are_finite_and_not_negative(answers: list[tuple[float, float, int, bool]]) -> None:
    times = DraftTimes()
    for at, (seconds, draft_s, num_tokens, alone) in enumerate(answers):
        times.observe(at, seconds, draft_s, num_tokens, alone=alone)
        for k in (0, 1, 128):
            found = times.delays.mean_s(k), times.delays.most_s(k), times.contention_s(k)
            assert all(0.0 <= each < float("inf") for each in found)


def told_confidences(*, honest: bool) -> AdaptivePolicy:
    """A policy after drafts of one token each, with an honest or a random confidence."""
    policy, rng, each = policy_after(step_s=EVEN_STEP_S, num_rows=4), random.Random(1), row()
    for told in rng.choices((SURE, UNSURE), k=600):
        meant = told if honest else rng.choice((SURE, UNSURE))
        round_ = chain_round(1, int(rng.random() < TRUE_SHARE[meant]))
        policy.measured.acceptance.observe([(each, [(round_, DraftNodes(bytes([told])))])])
    return policy


@pytest.mark.parametrize("waited_s", [0.0, 0.1])
def test_cut_verifies_sure_tokens_of_all_rows_and_all_after_a_long_wait(waited_s: float) -> None:
    told = [bytes((SURE, SURE)), bytes((UNSURE, SURE)), bytes((SURE, UNSURE)), bytes((UNSURE,))]
    drafts, policy = [(row(), DraftNodes(each)) for each in told], told_confidences(honest=True)
    took(policy, waited_s)
    kept = [sure or waited_s > 0.0 for sure in (True, True, False, False, True, False, False)]
    assert policy.cut(drafts, 4, 4) == kept
    far = row(name="b"), DraftNodes(bytes((UNSURE,)))
    took(policy, 0.1, name="b")
    assert all(policy.cut([*drafts, far], 5, 5)), "a step waits for the latest draft"
    far[0].measured.worth_waiting = False
    assert policy.cut([*drafts, far], 5, 5)[:7] == kept, "nobody waits for it"
    policy.measured.steps.padded = True
    assert all(policy.cut(drafts, 4, 4)), "shorter drafts save nothing"
    assert all(AdaptivePolicy(4).cut(drafts, 4, 4)), "nothing is known"


def test_confidences_of_a_liar_come_to_mean_its_usual_acceptance_and_none_is_forgotten() -> None:
    """A confidence that is forgotten would be tried for that alone, again and again."""
    drafts = [(row(), DraftNodes(bytes([told]))) for told in (SURE, UNSURE)]
    acceptance, usual = told_confidences(honest=False).measured.acceptance, sum(TRUE_SHARE.values())
    np.testing.assert_allclose(acceptance.survivals_of_nodes(drafts), usual / 2, atol=0.12)
    acceptance = told_confidences(honest=True).measured.acceptance
    [_, before] = acceptance.survivals_of_nodes(drafts)
    for _ in range(1000):
        acceptance.observe([(row(), [(chain_round(1, 1), DraftNodes(bytes([SURE])))])])
    assert acceptance.survivals_of_nodes(drafts)[1] == pytest.approx(before, abs=0.02)


def test_confidence_that_was_never_tried_is_believed_whatever_siblings_met() -> None:
    """Most nodes of a tree fail, so their mean says nothing of a sure one."""
    policy, siblings = policy_after(step_s=EVEN_STEP_S, num_rows=1), bytes([UNSURE] * 3)
    for _ in range(20):
        failed = Round(3, 1, 0, rejected=True), DraftNodes(siblings, (-1, -1, -1))
        policy.measured.acceptance.observe([(row(), [failed])])
    for told, kept in ((SURE, True), (UNSURE, False)):
        assert policy.cut([(row(), DraftNodes(bytes([told])))], 1, 1) == [kept]


def waiting_rows(num: int, *, ahead: bool = False) -> list[Any]:
    each = [SimpleNamespace(drafting=row(ahead=ahead), draft=None) for _ in range(num)]
    for waiting in each:
        waiting.drafting.round.deadline = 0.009
    return each


@pytest.mark.parametrize(
    ("step_s", "num_ready", "now", "beside_s", "start_at"),
    [
        *[(SLOW, n, 0.001, late_s, 0.004) for n in (1, 31) for late_s in (None, 0.0039, 0.0041)],
        (SLOW, 31, 0.050, None, 0.009),  # overdue; below the patience with them has not ended
        (FAST, 16, 0.0, 0.004, 0.0),  # half of the rows take 5.5 ms, and then again
        (FAST, 16, 0.0, 0.008, 0.004),  # all take 8 ms, after a wait of 4
        *[(FAST, 16, 0.005, late_s, at) for late_s, at in ((0.004, 0.005), (0.008, 0.009))],
    ],
)
def test_ready_rows_wait_for_drafts_that_come_soon_or_that_a_step_would_make_late(
    step_s: dict[int, float], num_ready: int, now: float, beside_s: float | None, start_at: float
) -> None:
    measured = policy_after(step_s=step_s, num_rows=32).measured
    each, times = waiting_rows(32), measured.draft_times(row())
    for at, delay_s in enumerate((0.004, beside_s) * 20):
        if delay_s is not None:
            times.observe(at, delay_s, 0.004, 4, alone=at % 2 == 0)
    found = Waiting(measured, 4).start_at(each[:num_ready], each[num_ready:], 0, now)
    assert found == pytest.approx(start_at, rel=0.03)


# Seconds of steps and drafts, share of free drafts after a miss, patience, and while it is unknown.
WAITS: dict[str, tuple[float, float, float, float, float]] = {
    "until drafts have come": (0.02, 0.005, 0.0, 0.005, 0.06),
    "drafts bring two tokens for two steps": (0.02, 0.039, 0.0, 0.039, 0.06),
    "the next one is free": (0.02, 0.039, 1.0, 0.0, 0.06),
    "drafts come later in any case": (0.02, 0.061, 0.0, 0.0, 0.0),
    "a text stands still no longer": (0.5, 0.24, 0.0, 0.24, 0.25),
    "drafts come later than that": (0.5, 0.26, 0.0, 0.0, 0.0),
}


@pytest.mark.parametrize(("step_s", "delay_s", "free", "usual", "long"), WAITS.values(), ids=WAITS)
def test_row_waits_as_long_as_its_draft_pays_and_not_in_vain(
    step_s: float, delay_s: float, free: float, usual: float, long: float
) -> None:
    policy, [each] = policy_after(step_s={1: step_s, 5: step_s}), waiting_rows(1)
    for at in range(60):
        policy.measured.draft_times(each.drafting).observe(at, delay_s, 0.0, 4, alone=True)
    measured, each.drafting.awaited.blocks = each.drafting.measured, 1
    measured.gain, measured.free_after_miss.mean = 2.0, free
    patience_s = partial(Waiting(policy.measured, 4).patience_s, each, 1)
    assert patience_s(unknown=False) == pytest.approx(usual, rel=0.01)
    assert patience_s(unknown=True) == pytest.approx(long)


def test_wait_for_a_first_block_is_as_long_as_the_rows_part_of_the_prompts() -> None:
    policy, [each] = policy_after(step_s={1: 0.02, 5: 0.02}), waiting_rows(1)
    each.counters = SimpleNamespace(prefill_s=0.08)
    patience_s = partial(Waiting(policy.measured, 4).patience_s, each, 8, unknown=False)
    assert patience_s() == pytest.approx(0.07)
    took(policy, 0.08)
    assert patience_s() == 0.0, "it takes no less than later ones"


@pytest.mark.parametrize(("gain", "wake_at"), [(0.5, 0.0), (10.0, 0.004)])
def test_rows_together_wait_only_for_more_than_they_commit(gain: float, wake_at: float) -> None:
    """These 32 rows commit 6.4 tokens in the 4 ms that the missing draft takes."""
    policy = policy_after(step_s={32: 0.02, 544: 0.02}, num_rows=32)
    late, *ready = each = waiting_rows(32, ahead=True)
    took(policy, 0.004)
    late.drafting.measured.gain = gain
    found = policy.choose_rows(ready, [late], 0, now=0.0)
    assert (len(found.rows), found.wake_at) == (0 if wake_at else 32, pytest.approx(wake_at))
    late.drafting.measured.gain, late.drafting.round.deadline = 0.0, 0.003
    assert policy.choose_rows([], each, 0, now=0.0).wake_at == 0.003, "its patience ends"
    assert len(policy.choose_rows([late], ready, 0, now=0.005).rows) == 32


def test_longer_drafts_in_vain_are_tried_in_few_steps() -> None:
    policy, tried = policy_after(step_s=EVEN_STEP_S), 0
    undrafted = StepDone(1, 1, 1, 0.0, 0, comparable=False, proposer_ids=frozenset("a"))
    for _ in range(4000):
        policy.step_done(undrafted)
        tried += policy._unknown
    assert 0 < tried < 0.05 * 4000


@given(st.binary(max_size=12), st.integers(1, 4), st.integers(1, 20), st.booleans(), st.booleans())
def test_cut_of_a_chain_is_that_of_a_tree_with_one_path(
    told: bytes, num_rows: int, num_others: int, dear: bool, captured: bool
) -> None:
    policy = policy_after(step_s=DEAR_STEP_S if dear else EVEN_STEP_S, num_rows=num_rows)
    each, chain, path = row(12), DraftNodes(told), DraftNodes(told, tuple(range(-1, len(told) - 1)))
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
def test_lone_row_tries_slow_steps_again(longer_s: float, tries: range, told: bytes) -> None:
    """Other work made those of 5 tokens slow, which is believed for as long as none runs."""
    counts, as_fast = list[int](), {1: 0.02, 4: 0.02, 5: 0.02}
    policy, each = policy_after((row(), chain_round(4, 4)), step_s=as_fast), row()
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
