"""Times of steps by their tokens, the sizes that steps run, and averages."""

from __future__ import annotations

import numpy as np
import pytest

from outrider.averages import Average
from outrider.step_times import StepSizes, StepTimes

STEP_S = ((1, 0.0075), (4, 0.0078), (8, 0.0089), (16, 0.0110), (64, 0.0260), (640, 0.2))
SIZES = ((1, 1), (8, 8), (1, 5), (8, 40), (32, 32), (32, 64), (32, 96), (32, 160))


def test_steps_run_the_next_captured_size() -> None:
    sizes = StepSizes(SIZES)

    def run(num_rows: int, *tokens: float) -> list[float]:
        filled = [sizes.run_one(num_rows, each) for each in tokens]
        assert filled == list(sizes.run(num_rows, np.array(tokens)))
        return filled

    assert run(1, 1, 2, 5, 6) == [1, 5, 5, 40]
    assert run(9, 9, 10, 64, 64.5, 160) == [32, 64, 64, 96, 160]
    assert run(32, 32, 33, 161) == [32, 64, 161]
    assert run(33, 33, 40) == [33, 40], "beyond all sizes a step is not filled up"
    assert StepSizes().run(3, np.array([3.0, 7.5])).tolist() == [3, 7.5]


def test_step_times_interpolate_between_what_was_measured() -> None:
    times = StepTimes()
    assert times.estimate(5) == 0.0
    for num_tokens, seconds in STEP_S:
        times.observe(num_tokens, seconds)
    assert times.estimate(1) == pytest.approx(0.0075)
    assert times.estimate(12) == pytest.approx((0.0089 + 0.0110) / 2)
    assert times.estimate(2000) > times.estimate(640)
    sizes = (0.5, 1.0, 2.5, 4.0, 12.0, 63.9, 64.0, 640.0, 700.0)
    assert [times.estimate(n) for n in sizes] == pytest.approx(times.estimates(np.array(sizes)))


def test_a_size_that_ran_once_cold_counts_as_fast_as_larger_ones() -> None:
    times = StepTimes()
    for num_tokens, seconds in ((1, 0.009), (2, 0.030), (4, 0.026), (5, 0.010)):
        times.observe(num_tokens, seconds)
    assert times.estimate(2) == times.estimate(5) == pytest.approx(0.010)


@pytest.mark.parametrize(("seconds", "expected"), [(0.010, 0.010), (0.030, 0.0216)])
def test_size_that_did_not_run_for_long_is_measured_anew_if_it_is_faster(
    seconds: float, expected: float
) -> None:
    times = StepTimes()
    for num_tokens, taken_s in [*[(5, 0.020)] * 8, *[(4, 0.009)] * 13, (5, seconds)]:
        times.observe(num_tokens, taken_s)
    assert times.estimate(5) == pytest.approx(expected, rel=0.01)


def test_one_outlier_moves_the_mean_of_times_little() -> None:
    average = Average()
    for value in (0.004, 0.004, 0.004, 1.0):
        average.add_time(value)
    assert average.mean < 0.008


def test_a_slow_first_time_is_left_at_once() -> None:
    """It held a compilation, or a first call."""
    average = Average()
    for value in (1.0, 0.8, 0.004, 0.004):
        average.add_time(value)
    assert average.mean == pytest.approx(0.004)
