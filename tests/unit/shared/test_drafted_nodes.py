"""Depths, products and outcomes of a draft's nodes against each node's own path."""

from __future__ import annotations

import time

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from outrider.draft_port import DraftOffer
from outrider.drafted_nodes import DraftNodes
from outrider.policy.measurements import Acceptance
from outrider.policy.row import Drafting, Offered


@st.composite
def drafts(draw: st.DrawFn) -> DraftNodes:
    told = draw(st.binary(max_size=12))
    parents = tuple([draw(st.integers(-1, i - 1)) for i in range(len(told))])
    return DraftNodes(told, draw(st.sampled_from((parents, ()))))


def path(parents: tuple[int, ...], node: int) -> list[int]:
    return [] if node < 0 else [*path(parents, parents[node]), node]


@given(drafts(), st.randoms(use_true_random=False))
def test_depths_products_and_outcomes_follow_from_each_nodes_path(nodes: DraftNodes, rng) -> None:  # type: ignore[no-untyped-def]
    size = len(nodes.confidences)
    parents, last = nodes.parents or tuple(range(-1, size - 1)), rng.randrange(-1, size)
    rates = np.array([rng.choice((1.0, 0.9, 0.3, 0.0)) for _ in range(size)])
    found, taken, tried = [*nodes.products(rates)], path(parents, last), []
    for node, parent in enumerate(parents):
        above = path(parents, node)
        assert nodes.depths[node] == len(above) - 1
        np.testing.assert_allclose(found[node], np.prod(rates[above]))
        assert parent < 0 or found[node] <= found[parent]
        if parent < 0 or parent in taken:
            tried.append((len(above) - 1, nodes.confidences[node], node in taken))
    assert nodes.tried(last) == tried


def test_survivals_of_256_rows_take_no_longer_than_a_step_can_wait() -> None:
    acceptance, offered = Acceptance(), Offered(4, proposer=DraftOffer("a", 4))
    each = [(Drafting(offered, drafter="a"), DraftNodes(bytes(4))) for _ in range(256)]
    times = []
    for _ in range(20):
        began = time.thread_time()
        acceptance.survivals_of_nodes(each)
        times.append(time.thread_time() - began)
    assert min(times) < 1e-3, "0.3 ms on an idle core"
