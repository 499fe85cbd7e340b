"""The choice of draft tokens against every other choice, and against sampling's law."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from outrider.policy import choose_nodes as module

STEP_S = 1.0  # of any step, beside what its tokens take


def choose_nodes(survivals: Sequence[float], seconds: Sequence[float], rows: int) -> list[int]:
    nodes = np.array(survivals)
    chosen = module.choose_nodes(nodes, np.sort(nodes)[::-1], np.array(seconds), rows)
    return np.flatnonzero(chosen).tolist()


@st.composite
def drafts(draw: st.DrawFn) -> tuple[NDArray[np.float64], NDArray[np.int64], list[float], int]:
    """Survivals and parents of up to nine nodes, seconds by number of tokens, and rows."""
    parents = [draw(st.integers(-1, i - 1)) for i in range(draw(st.integers(1, 9)))]
    rates = [draw(st.sampled_from((0.0, 0.3, 0.5, 0.9, 1.0))) for _ in parents]
    survivals: list[float] = []
    for parent, rate in zip(parents, rates, strict=True):
        survivals.append(rate * (1.0 if parent < 0 else survivals[parent]))
    more_s = [draw(st.sampled_from((0.0, 0.05, 0.2, 1.0))) for _ in range(len(parents) + 1)]
    seconds = [STEP_S + total for total in itertools.accumulate(more_s)]
    return np.array(survivals), np.array(parents), seconds, draw(st.integers(1, 5))


def closed_sets(parents: NDArray[np.int64]) -> Iterator[list[int]]:
    for chosen in itertools.product((False, True), repeat=len(parents)):
        nodes = [i for i, each in enumerate(chosen) if each]
        if all(parents[i] < 0 or chosen[parents[i]] for i in nodes):
            yield nodes


@given(drafts())
def test_choose_nodes_of_any_trees_is_closed_and_the_best_of_all_sets(
    case: tuple[NDArray[np.float64], NDArray[np.int64], list[float], int],
) -> None:
    survivals, parents, seconds, rows = case

    def speed(nodes: list[int]) -> float:
        return (rows + float(survivals[nodes].sum())) / seconds[len(nodes)]

    nodes = choose_nodes(survivals, seconds[: len(survivals) + 1], rows)
    assert nodes in list(closed_sets(parents))
    assert speed(nodes) == pytest.approx(max(map(speed, closed_sets(parents))))


def test_choose_nodes_of_256_rows_takes_no_python_per_node() -> None:
    rates = np.random.default_rng(1).random((256, 16))
    survivals = np.cumprod(0.5 + 0.5 * rates, axis=1).ravel()
    seconds = 5e-3 + 2e-5 * np.arange(256, 256 * 17 + 1)
    times = []
    for _ in range(50):
        began = time.thread_time()
        choose_nodes(survivals, seconds, 256)
        times.append(time.thread_time() - began)
    assert min(times) < 0.1e-3


# A draft of one or two tokens of 0 and 1 under rejection sampling. The draft model's second token
# is likely right only if it is a 1.
TARGET, DRAFT = np.array([0.5, 0.5]), np.array([0.8, 0.2])
CONFIDENCE = (0.1, 1.0)  # of the second token
Cut = Callable[[int], int]  # draft tokens to verify, by the second token


def first_token(cut: Cut) -> NDArray[np.float64]:
    """The law of a text's first token: drafts [t1, t2] are drawn, cut, and t1 verified or not."""
    law = np.zeros(2)
    left = np.maximum(0.0, TARGET - DRAFT) / np.maximum(0.0, TARGET - DRAFT).sum()
    for first, second in itertools.product((0, 1), repeat=2):
        # The second token is drawn given the first: the same one again.
        drawn = DRAFT[first] * (0.9 if second == first else 0.1)
        if not cut(second):
            law += drawn * TARGET
            continue
        accepted = min(1.0, TARGET[first] / DRAFT[first])
        law[first] += drawn * accepted
        law += drawn * (1.0 - accepted) * left
    return law


def chosen(survivals: list[float]) -> int:
    """One row, and a step that has room for two draft tokens as soon as it has for one."""
    return len(choose_nodes(survivals, [1.0, 1.6, 1.6], 1))


def test_cut_by_what_was_measured_before_keeps_the_law_of_rejection_sampling() -> None:
    for survivals in ([0.5, 0.05], [0.5, 0.45]):
        np.testing.assert_allclose(first_token(lambda _, s=survivals: chosen(s)), TARGET)


def test_cut_by_later_tokens_changes_the_law_of_rejection_sampling() -> None:
    """Why confidences in a draft's own tokens must not choose what is verified before them."""

    def naive(second: int) -> int:
        return chosen([0.5, 0.5 * CONFIDENCE[second]])

    assert {naive(0), naive(1)} == {0, 2}
    assert np.abs(first_token(naive) - TARGET).max() > 0.05
