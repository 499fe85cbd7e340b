"""The choice of draft tokens against every other choice, and against sampling's law."""

from __future__ import annotations

import itertools
import timeit
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from outrider.policy import choose_nodes as module

RATES, MORE_S = st.sampled_from((0.0, 0.3, 0.5, 0.9, 1.0)), st.sampled_from((0.0, 0.05, 0.2, 1.0))


def choose_nodes(survivals: Sequence[float], seconds: Sequence[float], rows: int) -> list[int]:
    chosen, _ = module.choose_nodes(np.array(survivals), np.array(seconds), rows)
    return np.flatnonzero(chosen).tolist()


@given(st.data(), st.integers(1, 9), st.integers(1, 5))
def test_choice_in_any_trees_is_best(data: st.DataObject, num_nodes: int, rows: int) -> None:
    """No other set that has the parents of its nodes brings more tokens a second."""
    survivals, seconds = list[float](), [1.0 + data.draw(MORE_S)]
    closed_sets: list[list[int]] = [[]]
    for node in range(num_nodes):
        parent, rate = data.draw(st.integers(-1, node - 1)), data.draw(RATES)
        survivals.append(rate * (1.0 if parent < 0 else survivals[parent]))
        seconds.append(seconds[-1] + data.draw(MORE_S))
        closed_sets += [[*nodes, node] for nodes in closed_sets if parent < 0 or parent in nodes]
    gains = [rows + sum(survivals[node] for node in nodes) for nodes in closed_sets]
    speeds = [gain / seconds[len(nodes)] for gain, nodes in zip(gains, closed_sets, strict=True)]
    chosen = choose_nodes(survivals, seconds, rows)
    assert speeds[closed_sets.index(chosen)] == pytest.approx(max(speeds))


def test_choose_nodes_of_256_rows_takes_well_under_a_tenth_of_a_millisecond() -> None:
    survivals = np.random.default_rng(1).uniform(0.5, 1.0, (256, 16)).cumprod(axis=1).ravel()
    args = survivals, 5e-3 + 2e-5 * np.arange(256, 4353), 256
    assert min(timeit.repeat(lambda: module.choose_nodes(*args), number=1, repeat=2000)) < 1e-4


# A draft of two tokens of 0 and 1 under rejection sampling. The second one is the first again in
# nine of ten cases, and a 1 is the likelier to be right.
TARGET, DRAFT = np.array([0.5, 0.5]), np.array([0.8, 0.2])
REPEATED, SURVIVALS = 0.9, (0.05, 0.5)  # of the second token


def first_token(cut: list[int]) -> NDArray[np.float64]:
    """The law of a text's first token, if `cut` says by the second one how many are verified."""
    law, left = np.zeros(2), np.maximum(0.0, TARGET - DRAFT)
    for first, second in itertools.product((0, 1), repeat=2):
        drawn = DRAFT[first] * (REPEATED if second == first else 1.0 - REPEATED)
        accepted = min(1.0, TARGET[first] / DRAFT[first])
        verified = accepted * np.eye(2)[first] + (1.0 - accepted) * left / left.sum()
        law += drawn * (verified if cut[second] else TARGET)
    return law


def test_only_a_cut_by_later_tokens_changes_the_law_of_rejection_sampling() -> None:
    """Why confidences in a draft's own tokens must not choose what is verified before them."""
    # One row, and a step that has room for two draft tokens as soon as it has for one.
    chosen = [len(choose_nodes([0.5, survival], [1.0, 1.6, 1.6], 1)) for survival in SURVIVALS]
    assert chosen == [0, 2]
    for cut in chosen:
        np.testing.assert_allclose(first_token([cut, cut]), TARGET)
    assert np.abs(first_token(chosen) - TARGET).max() > 0.05
