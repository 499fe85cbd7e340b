"""What the policy makes of its measurements."""

from __future__ import annotations

import pytest

from outrider.engine.policy.timing import UNCONTENDED_LASTS, Average, Delay, DraftTimes


def hear(
    times: DraftTimes, seconds: float, draft_s: float, num_tokens: int, *, uncontended: bool
) -> None:
    times.observe(Delay(seconds, draft_s, num_tokens, uncontended))


def test_average_with_one_outlier_moves_little() -> None:
    average = Average()
    for value in (0.005, 0.005, 2.0):
        average.add(value)
    assert average.mean < 0.01
    late = Average()
    late.add(2.0)
    late.add(0.005)
    assert late.mean == pytest.approx(0.005)


def test_average_after_zero_follows_values() -> None:
    average = Average()
    for value in (0.0, 0.004, 0.0, 0.004):
        average.add(value)
    assert average.mean == pytest.approx(0.004)


def test_draft_times_with_uncontended_drafts_ignore_contended() -> None:
    times = DraftTimes()
    for _ in range(4):
        hear(times, 0.012, 0.008, 4, uncontended=False)
    assert times.delay.mean == pytest.approx(0.012), "better than nothing"
    for _ in range(4):
        hear(times, 0.005, 0.004, 4, uncontended=True)
    assert times.delay.mean == pytest.approx(0.005)
    for _ in range(UNCONTENDED_LASTS - 1):
        hear(times, 0.012, 0.008, 4, uncontended=False)
    assert times.delay.mean == pytest.approx(0.005)
    assert times.token_s == pytest.approx(0.001)
    assert [times.mean_s(k) for k in (0, 2, 4)] == pytest.approx([0.001, 0.003, 0.005])
    hear(times, 0.012, 0.008, 4, uncontended=False)
    assert times.delay.mean == pytest.approx(0.012), "there are no uncontended ones any more"


def test_draft_times_after_wait_in_vain_grow() -> None:
    """Two of three take 6 ms, the third 9: waiting ends before it comes, until that is known."""
    times = DraftTimes()
    for at in range(60):
        late = at % 3 == 2
        awaited_s = times.mean_s(4) + 4 * times.delay.deviation
        if not late:
            times.observe(Delay(0.006, 0.004, 4, uncontended=True))
        elif awaited_s >= 0.009:
            times.observe(Delay(0.009, 0.007, 4, uncontended=True))
        else:  # beside a step it takes longer
            seconds = awaited_s + 2 * (0.009 - awaited_s)
            times.observe(Delay(seconds, 0.007, 4, uncontended=False, waited_s=awaited_s))
    assert awaited_s >= 0.009
    assert times.mean_s(4) == pytest.approx(0.007, abs=0.0005)
    own_device = DraftTimes()
    own_device.observe(Delay(0.009, 0.007, 4, uncontended=False, own_device=True, waited_s=0.006))
    assert own_device.mean_s(4) == pytest.approx(0.009), "a step does not slow it down"


def test_draft_times_of_own_device_count_contended() -> None:
    """One row's came in 4 ms, calm; those of 64 take 9, beside steps begun without them."""
    times = DraftTimes()
    times.observe(Delay(0.004, 0.003, 4, uncontended=True, own_device=True))
    for _ in range(16):
        times.observe(Delay(0.009, 0.006, 4, uncontended=False, own_device=True))
    assert times.mean_s(4) == pytest.approx(0.009, rel=0.1)
    assert times.contention_s == 0.0


def test_draft_times_with_both_kinds_know_contention() -> None:
    times = DraftTimes()
    hear(times, 0.012, 0.008, 4, uncontended=False)
    assert times.contention_s == 0.0, "not known"
    hear(times, 0.005, 0.004, 4, uncontended=True)
    assert times.contention_s == 0.0
    for _ in range(UNCONTENDED_LASTS):
        hear(times, 0.008, 0.004, 4, uncontended=False)
    assert times.contention_s == pytest.approx(0.003), "long after the last of its kind"


def test_draft_times_with_lying_proposer_cap_drafting_time() -> None:
    times = DraftTimes()
    hear(times, 0.004, 60.0, 4, uncontended=True)
    assert times.token_s == pytest.approx(0.001)
