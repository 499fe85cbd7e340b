"""Rows in two halves: which go, when, and what that brings."""

from __future__ import annotations

import pytest

from outrider.draft_port import DraftOffer
from outrider.engine.policy.adaptive import AdaptivePolicy
from outrider.engine.policy.draft_mode import DraftMode
from outrider.engine.policy.microbatches import pay_off, start_at
from outrider.engine.policy.row import CurrentRound, Drafting
from outrider.engine.policy.timing import Delay
from outrider.engine.policy.tracker import DraftTracker
from outrider.engine.policy.waiting import Waiting
from outrider.engine.sequence import Sequence
from outrider.params import SamplingParams
from outrider.types import Request
from tests.support.simulators.two_devices import TwoDevices


def row(session: int) -> Sequence:
    """It drafts on demand, on a device of its own, and its draft is due at 0.009."""
    request = Request(session, (1, 2), SamplingParams(temperature=0.0))
    d = Drafting(4, proposer=DraftOffer("a", 4, own_device=True), drafter="a ", blocks=1)
    d.num_draft_tokens, d.round = 4, CurrentRound(looked_at=0.0, deadline=0.02)
    return Sequence(request, max_len=64, stop_ids=frozenset(), drafting=d, submitted_at=0.0)


def rows_of_a_policy(
    step_s: float, drafts_s: float = 0.009
) -> tuple[AdaptivePolicy, list[Sequence]]:
    policy = AdaptivePolicy(4)
    policy.measured.costs.observe_step(4, 20, step_s)
    rows = [row(i) for i in range(8)]
    for _ in range(8):
        delay = Delay(drafts_s, 0.006, 4, uncontended=True)
        policy.measured.costs.observe_delay(rows[0].drafting, delay)
    return policy, rows


def has_draft(seq: Sequence, committed_at: float = 0.0) -> None:
    seq.drafting.round.deadline = 0.0  # so it is ready
    seq.drafting.round.committed_at = committed_at


def going(policy: AdaptivePolicy, rows: list[Sequence], now: float) -> list[int]:
    return [seq.session_id for seq in DraftTracker(policy).choose_rows(rows, 0, now).rows]


def test_microbatch_of_ready_rows_takes_those_that_waited_longest() -> None:
    policy, rows = rows_of_a_policy(step_s=0.006)
    for i, seq in enumerate(rows):
        has_draft(seq, committed_at=0.001 * (i % 2))
    assert going(policy, rows, now=0.01) == [0, 2, 4, 6]


@pytest.mark.parametrize(
    ("own_device", "runs_ahead"), [(False, False), (True, True)], ids=["shared", "ahead"]
)
def test_rows_on_a_shared_device_or_ahead_go_together(own_device: bool, runs_ahead: bool) -> None:
    policy, rows = rows_of_a_policy(step_s=0.006)
    for seq in rows:
        has_draft(seq)
        seq.drafting.proposer = DraftOffer("a", 4, own_device=own_device)
        seq.drafting.runs_ahead = runs_ahead
    assert len(going(policy, rows, now=0.01)) == 8


def test_rows_with_steps_longer_than_drafts_go_together() -> None:
    policy, rows = rows_of_a_policy(step_s=0.006, drafts_s=0.005)
    for seq in rows:
        has_draft(seq)
    assert len(going(policy, rows, now=0.01)) == 8


def test_microbatch_does_not_wait_for_the_other() -> None:
    policy, rows = rows_of_a_policy(step_s=0.006)
    for seq in rows[:4]:
        has_draft(seq)
    for seq in rows[4:]:
        seq.drafting.round.committed_at, seq.drafting.round.deadline = 0.004, 0.03
    assert going(policy, rows, now=0.005) == [0, 1, 2, 3]


def test_microbatch_start_waits_for_rows_while_that_costs_less() -> None:
    assert start_at(4, [0.001] * 4, 0.006, 0.0) == 0.0, "it lacks none"
    assert start_at(7, [0.001], 0.006, 0.0) == 0.0, "more are ready than go"
    assert start_at(1, [0.001] * 7, 0.006, 0.0) == 0.001
    assert start_at(3, [0.004] * 5, 0.006, 0.0) == 0.0, "three rows wait for one"
    assert start_at(0, [0.003, 0.005, 0.009, 0.009], 0.004, 0.0) == 0.005, "nobody is delayed"


def test_microbatches_pay_off_while_the_proposer_keeps_up() -> None:
    assert pay_off(0.006, 0.014, delay_s=0.008, drafting_s=0.005)
    assert not pay_off(0.009, 0.017, delay_s=0.008, drafting_s=0.005), "two steps take longer"
    assert pay_off(0.006, 0.0125, delay_s=0.0055, drafting_s=0.004), "drafts are there a bit sooner"
    assert pay_off(0.005, 0.014, delay_s=0.009, drafting_s=0.006), (
        "it rests while drafts are under way"
    )
    for way_s in (0.001, 0.004):
        step_s, drafting_s = 0.005, 0.012
        together_s, in_turns_s = step_s + drafting_s + way_s, 2 * drafting_s
        assert in_turns_s > together_s
        assert not pay_off(step_s, together_s, drafting_s + way_s, drafting_s)
        assert not pay_off(step_s, together_s, in_turns_s - step_s, drafting_s), (
            "nor once they were begun"
        )


def test_microbatches_are_faster_with_the_same_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 rows of which all draft on demand, without trials, beside newcomers' prompts."""
    monkeypatch.setattr(AdaptivePolicy, "may_wait", True)
    monkeypatch.setattr(AdaptivePolicy, "mode", DraftMode.ON_DEMAND)
    rates, texts = [], []
    for halves in (False, True):
        with monkeypatch.context() as patched:
            if not halves:
                patched.setattr(Waiting, "microbatch_step_s", lambda *_: 0.0)
            world = TwoDevices(64, 0.0, max_branches=0)
            world.rate(1.5)
            rates.append(world.rate(2.0))
            texts.append({i: world.committed[i] for i in world.last})
    assert rates[1] > 1.1 * rates[0]
    assert len(texts[0]) > 50
    assert all(texts[1][i] == text for i, text in texts[0].items() if i in texts[1])


def test_many_rows_after_one_keep_their_drafts() -> None:
    """What one row's drafts took is too short a time to wait for those of 32."""
    world = TwoDevices(32, 0.0, max_branches=0)
    world.rate(2.0)
    world.set_rows(1)
    world.rate(1.5)
    world.set_rows(32)
    rate = world.rate(1.0)
    world.rate(1.0)
    assert rate > 0.85 * world.rate(2.0)
