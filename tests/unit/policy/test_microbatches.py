"""Halves that take turns: who goes, when, and what it brings."""

from __future__ import annotations

import pytest

from outrider.engine.policy.adaptive import AdaptivePolicy
from outrider.engine.policy.microbatches import begins_at, pay
from outrider.engine.policy.mode import DraftMode
from outrider.engine.policy.timing import Delay
from outrider.engine.sequence import Sequence
from outrider.params import SamplingParams
from outrider.types import Request
from tests.support.simulators.two_devices import TwoDevices


def row(policy: AdaptivePolicy, session: int) -> Sequence:
    """It drafts on demand, on a device of its own, and its draft is due at 0.009."""
    request = Request(session, (1, 2), SamplingParams(temperature=0.0))
    d = policy.drafting(request)
    d.proposer_id, d.drafter, d.proposer_limit, d.num_draft_tokens = "a", "a ", 4, 4
    d.own_device, d.blocks, d.looked_at, d.deadline = True, 1, 0.0, 0.02
    return Sequence(request, max_len=64, stop_ids=frozenset(), drafting=d, submitted_at=0.0)


def rows_of_a_policy(
    step_s: float, drafts_s: float = 0.009
) -> tuple[AdaptivePolicy, list[Sequence]]:
    policy = AdaptivePolicy(4)
    policy.observe_step(4, 20, step_s)
    rows = [row(policy, i) for i in range(8)]
    for at in range(8):
        policy.observe_delay(
            rows[0].drafting, Delay(float(at), drafts_s, 0.006, 4, uncontended=True)
        )
    for seq in rows:
        for _ in range(8):
            policy.choose_k(seq.drafting, 4)
    return policy, rows


def has_draft(seq: Sequence, committed_at: float = 0.0) -> None:
    seq.drafting.deadline = 0.0  # so it is ready
    seq.drafting.committed_at = committed_at


def going(policy: AdaptivePolicy, rows: list[Sequence], now: float) -> list[int]:
    return [seq.session_id for seq in policy.split(rows, 0, now).rows]


def test_of_all_rows_half_goes_that_had_its_last_round_first() -> None:
    policy, rows = rows_of_a_policy(step_s=0.006)
    for i, seq in enumerate(rows):
        has_draft(seq, committed_at=0.001 * (i % 2))
    assert going(policy, rows, now=0.01) == [0, 2, 4, 6]


@pytest.mark.parametrize(("name", "value"), [("own_device", False), ("runs_ahead", True)])
def test_rows_go_together_where_drafts_share_the_device_or_come_ahead(
    name: str, value: bool
) -> None:
    policy, rows = rows_of_a_policy(step_s=0.006)
    for seq in rows:
        has_draft(seq)
        setattr(seq.drafting, name, value)
    assert len(going(policy, rows, now=0.01)) == 8


def test_rows_go_together_where_a_step_takes_longer_than_drafts() -> None:
    policy, rows = rows_of_a_policy(step_s=0.006, drafts_s=0.005)
    for seq in rows:
        has_draft(seq)
    assert len(going(policy, rows, now=0.01)) == 8


def test_a_half_does_not_wait_for_the_other() -> None:
    policy, rows = rows_of_a_policy(step_s=0.006)
    for seq in rows[:4]:
        has_draft(seq)
    for seq in rows[4:]:
        seq.drafting.committed_at, seq.drafting.deadline = 0.004, 0.03
    assert going(policy, rows, now=0.005) == [0, 1, 2, 3]


def test_a_step_waits_for_what_a_half_lacks_while_that_costs_less_than_to_miss_it() -> None:
    assert begins_at(4, [0.001] * 4, 0.006, 0.0) == 0.0, "it lacks none"
    assert begins_at(7, [0.001], 0.006, 0.0) == 0.0, "more are ready than go"
    assert begins_at(1, [0.001] * 7, 0.006, 0.0) == 0.001
    assert begins_at(3, [0.004] * 5, 0.006, 0.0) == 0.0, "three rows wait for one"
    assert begins_at(0, [0.003, 0.005, 0.009, 0.009], 0.004, 0.0) == 0.005, "nobody is delayed"


def test_turns_pay_while_the_proposer_keeps_up_with_both_halves() -> None:
    assert pay(0.006, 0.014, delay_s=0.008, drafting_s=0.005)
    assert not pay(0.009, 0.017, delay_s=0.008, drafting_s=0.005), "two steps take longer"
    assert pay(0.006, 0.0125, delay_s=0.0055, drafting_s=0.004), "drafts are there a bit sooner"
    assert pay(0.005, 0.014, delay_s=0.009, drafting_s=0.006), "it rests while drafts are under way"
    for way_s in (0.001, 0.004):
        step_s, drafting_s = 0.005, 0.012
        together_s, in_turns_s = step_s + drafting_s + way_s, 2 * drafting_s
        assert in_turns_s > together_s
        assert not pay(step_s, together_s, drafting_s + way_s, drafting_s)
        assert not pay(step_s, together_s, in_turns_s - step_s, drafting_s), (
            "nor once they were begun"
        )


def test_turns_go_on_although_the_drafts_of_a_half_come_sooner() -> None:
    """Than those of all, and than two steps of a half take longer than one of all."""
    policy, rows = rows_of_a_policy(step_s=0.0055, drafts_s=0.006)
    for at in range(16):
        half = Delay(10.0 + at, 0.005, 0.003, 4, uncontended=False, apart=True)
        policy.observe_delay(rows[0].drafting, half)
    for seq in rows:
        has_draft(seq)
    assert len(going(policy, rows, now=0.01)) == 4


def test_halves_in_turns_are_faster_and_say_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 rows of which all draft on demand, without trials; beside them newcomers' prompts."""
    monkeypatch.setattr(AdaptivePolicy, "may_wait", True)
    monkeypatch.setattr(AdaptivePolicy, "way", DraftMode.ON_DEMAND)
    rates, texts = [], []
    for turns in (False, True):
        with monkeypatch.context() as patched:
            if not turns:
                patched.setattr(AdaptivePolicy, "turn_s", lambda *_: 0.0)
            world = TwoDevices(64, 0.0, max_branches=0)
            world.rate(1.5)
            rates.append(world.rate(2.0))
            texts.append({i: world.committed[i] for i in world.last})
    assert rates[1] > 1.1 * rates[0]
    assert len(texts[0]) > 50
    assert all(texts[1][i] == text for i, text in texts[0].items() if i in texts[1])


def test_many_rows_after_one_do_not_go_without_drafts() -> None:
    """What one row's drafts took is too short a time to wait for those of 32."""
    world = TwoDevices(32, 0.0, max_branches=0)
    world.rate(2.0)
    world.set_rows(1)
    world.rate(1.5)
    world.set_rows(32)
    rate = world.rate(1.0)
    world.rate(1.0)
    assert rate > 0.85 * world.rate(2.0)
