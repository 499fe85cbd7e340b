"""What the policy makes of its measurements."""

from __future__ import annotations

import itertools

import pytest

from outrider.engine.policy.timing import CALM_LASTS, Average, Delay, DraftTimes, PromptTimes

MOMENTS = itertools.count()


def hear(
    times: DraftTimes, seconds: float, draft_s: float, num_tokens: int, *, uncontended: bool
) -> None:
    """Of a batch of its own."""
    times.observe(Delay(float(next(MOMENTS)), seconds, draft_s, num_tokens, uncontended))


def test_one_value_moves_a_mean_little_and_one_that_began_it_is_left_at_once() -> None:
    average = Average()
    for value in (0.005, 0.005, 2.0):
        average.add(value)
    assert average.mean < 0.01
    late = Average()
    late.add(2.0)
    late.add(0.005)
    assert late.mean == pytest.approx(0.005)


def test_a_zero_does_not_hold_a_mean() -> None:
    average = Average()
    for value in (0.0, 0.004, 0.0, 0.004):
        average.add(value)
    assert average.mean == pytest.approx(0.004)


def test_drafts_beside_steps_do_not_count_where_there_are_calm_ones() -> None:
    times = DraftTimes()
    for _ in range(4):
        hear(times, 0.012, 0.008, 4, uncontended=False)
    assert times.delay.mean == pytest.approx(0.012), "better than nothing"
    for _ in range(4):
        hear(times, 0.005, 0.004, 4, uncontended=True)
    assert times.delay.mean == pytest.approx(0.005)
    for _ in range(CALM_LASTS - 1):
        hear(times, 0.012, 0.008, 4, uncontended=False)
    assert times.delay.mean == pytest.approx(0.005)
    assert times.token_s == pytest.approx(0.001)
    assert [times.mean_s(k) for k in (0, 2, 4)] == pytest.approx([0.001, 0.003, 0.005])
    hear(times, 0.012, 0.008, 4, uncontended=False)
    assert times.delay.mean == pytest.approx(0.012), "there are no calm ones any more"


def test_a_calm_draft_that_waited_for_something_else_is_left_although_none_is_calm_since() -> None:
    """The first one came after 20 ms: for as long as it counts no row waits, so none is calm."""
    times = DraftTimes()
    hear(times, 0.020, 0.004, 4, uncontended=True)
    for _ in range(16):
        hear(times, 0.0065, 0.004, 4, uncontended=False)
    assert times.mean_s(4) < 0.0131
    for _ in range(40):
        hear(times, 0.004, 0.003, 4, uncontended=True)
    mean_s = times.mean_s(4)
    for seconds in (0.0065, 0.0025, 0.0030):
        hear(times, seconds, 0.002, 4, uncontended=False)
        assert times.mean_s(4) == mean_s, "others say nothing of calm ones"


def test_drafts_that_were_waited_for_in_vain_count() -> None:
    """Two of three take 6 ms, the third 9: waiting ends before it comes, until that is known."""
    times = DraftTimes()
    for at in range(60):
        late = at % 3 == 2
        awaited_s = times.mean_s(4) + 4 * times.delay.deviation
        if not late:
            times.observe(Delay(float(at), 0.006, 0.004, 4, uncontended=True))
        elif awaited_s >= 0.009:
            times.observe(Delay(float(at), 0.009, 0.007, 4, uncontended=True))
        else:  # beside a step it takes longer
            seconds = awaited_s + 2 * (0.009 - awaited_s)
            times.observe(
                Delay(float(at), seconds, 0.007, 4, uncontended=False, waited_s=awaited_s)
            )
    assert awaited_s >= 0.009
    assert times.mean_s(4) == pytest.approx(0.007, abs=0.0005)
    apart = DraftTimes()
    apart.observe(Delay(0.0, 0.009, 0.007, 4, uncontended=False, apart=True, waited_s=0.006))
    assert apart.mean_s(4) == pytest.approx(0.009), "a step does not slow it down"


def test_drafts_of_another_device_count_beside_steps_too() -> None:
    """One row's came in 4 ms, calm; those of 64 take 9, beside steps begun without them."""
    times = DraftTimes()
    times.observe(Delay(0.0, 0.004, 0.003, 4, uncontended=True, apart=True))
    for at in range(1, 17):
        times.observe(Delay(float(at), 0.009, 0.006, 4, uncontended=False, apart=True))
    assert times.mean_s(4) == pytest.approx(0.009, rel=0.1)
    assert times.uncontended_s(4) >= times.mean_s(4)
    assert times.contention_s == 0.0


def test_how_long_all_waited_together_is_known_for_a_while() -> None:
    times = DraftTimes()
    times.observe(Delay(0.0, 0.008, 0.005, 4, uncontended=True, apart=True))
    for at in range(1, CALM_LASTS):
        times.observe(Delay(float(at), 0.006, 0.004, 4, uncontended=False, apart=True))
    assert times.uncontended_s(4) == pytest.approx(0.008)
    times.observe(Delay(float(CALM_LASTS), 0.006, 0.004, 4, uncontended=False, apart=True))
    assert times.uncontended_s(4) == pytest.approx(0.006, rel=0.01)


def test_a_batch_takes_as_long_as_its_longest_draft() -> None:
    times = DraftTimes()
    for at in (1.0, 2.0, 3.0):
        for num_tokens in (4, 2, 1, 1):
            times.observe(Delay(at, 0.008, 0.006, num_tokens, uncontended=True))
    assert times.delay.count == 3
    assert times.token_s == pytest.approx(0.0015)
    assert times.mean_s(4) == pytest.approx(0.008)


def test_what_a_step_beside_a_draft_costs_it_is_known_from_both() -> None:
    times = DraftTimes()
    hear(times, 0.012, 0.008, 4, uncontended=False)
    assert times.contention_s == 0.0, "not known"
    hear(times, 0.005, 0.004, 4, uncontended=True)
    assert times.contention_s == 0.0
    for _ in range(CALM_LASTS):
        hear(times, 0.008, 0.004, 4, uncontended=False)
    assert times.contention_s == pytest.approx(0.003), "long after the last of its kind"


def test_a_proposer_is_not_believed_to_have_drafted_longer_than_it_was_waited_for() -> None:
    times = DraftTimes()
    hear(times, 0.004, 60.0, 4, uncontended=True)
    assert times.token_s == pytest.approx(0.001)


def test_prompts_are_priced_by_the_tokens_of_late() -> None:
    times = PromptTimes()
    assert times.token_s is None
    times.observe(400, 0.020)
    assert times.token_s == pytest.approx(5e-5)
    times.observe(4, 0.008)  # a few tokens say little
    assert times.token_s < 7.5e-5
    for _ in range(20):
        times.observe(100, 0.010)
    assert times.token_s == pytest.approx(1e-4, rel=0.02)
