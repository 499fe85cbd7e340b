"""Flat arrays of many drafts' nodes against a loop over each draft's own."""

from __future__ import annotations

import time

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from outrider.drafted_nodes import DraftNodes, Forest


@st.composite
def drafts(draw: st.DrawFn) -> list[DraftNodes]:
    found = []
    for _ in range(draw(st.integers(1, 4))):
        told = draw(st.binary(min_size=1, max_size=12))
        parents = tuple([draw(st.integers(-1, i - 1)) for i in range(len(told))])
        found.append(DraftNodes(told, draw(st.sampled_from((parents, ())))))
    return found


def path(parents: tuple[int, ...], node: int) -> list[int]:
    return [] if node < 0 else [*path(parents, parents[node]), node]


@given(drafts(), st.randoms(use_true_random=False))
def test_forest_of_any_drafts_is_what_each_draft_says(all_nodes: list[DraftNodes], rng) -> None:  # type: ignore[no-untyped-def]
    forest = Forest(all_nodes)
    last = [rng.randrange(-1, len(nodes.confidences)) for nodes in all_nodes]
    rates = np.array([rng.choice((1.0, 0.9, 0.3, 0.0)) for _ in range(forest.size)])
    survivals, (accepted, tried) = forest.products(rates), forest.verified(np.array(last))
    for start, end, nodes in zip(forest.starts.tolist(), last, all_nodes, strict=True):
        size = len(nodes.confidences)
        parents = nodes.parents or tuple(range(-1, size - 1))
        taken = path(parents, end)
        for i, parent in enumerate(parents):
            node, above = start + i, path(parents, i)
            assert forest.confidences[node] == nodes.confidences[i]
            assert forest.depths[node] == len(above) - 1
            np.testing.assert_allclose(survivals[node], np.prod(rates[start + np.array(above)]))
            assert parent < 0 or survivals[node] <= survivals[start + parent]
            assert (accepted[node], tried[node]) == (i in taken, parent < 0 or parent in taken)


def test_forest_of_256_rows_takes_no_python_per_node() -> None:
    nodes = [DraftNodes(bytes(16))] * 256
    times = []
    for _ in range(20):
        began = time.thread_time()
        forest = Forest(nodes)
        forest.products(np.full(forest.size, 0.9))
        times.append(time.thread_time() - began)
    assert min(times) < 1.5e-3, "0.4 ms on an idle core"
