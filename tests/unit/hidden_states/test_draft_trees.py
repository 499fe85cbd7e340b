"""Trees spent by score against all paths tried, and scores against what the target would draw."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider.draft_tree import DraftTree
from outrider.drafting.graphs import beams
from outrider.drafting.hidden_states.trees import (
    Nodes,
    TargetDraws,
    best_nodes,
    best_products,
    nodes_on_device,
)
from outrider.engine.sampling.sample import SamplingBatch, sample
from outrider.params import SamplingParams

CPU = torch.device("cpu")


def paths(nodes: Nodes) -> list[tuple[int, ...]]:
    """The tokens from the root to each node; checks that it is a tree of different siblings."""
    tokens, parents, _ = nodes
    tree = DraftTree.validated(0, tokens, parents, vocab_size=1000, max_nodes=1000)
    found: list[tuple[int, ...]] = []
    for token, parent in zip(tree.token_ids, tree.parents, strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    assert len(set(found)) == len(found)
    return found


@given(
    probs=st.lists(st.lists(st.floats(0.01, 1.0), min_size=3, max_size=3), min_size=1, max_size=4),
    cut=st.integers(0, 3),
    num_nodes=st.integers(1, 20),
)
def test_best_products_of_any_probs_are_the_best_of_all_paths(
    probs: list[list[float]], cut: int, num_nodes: int
) -> None:
    levels = [sorted(level, reverse=True) for level in probs]
    log_probs = [[math.log(p / sum(level)) for p in level] for level in levels]
    for level in log_probs[:cut]:
        level[-1] = -math.inf  # cut by the request's parameters: never drafted
    token_ids = [[10 * depth + rank for rank in range(3)] for depth in range(len(levels))]
    every = {
        tuple(token_ids[d][r] for d, r in enumerate(ranks)): sum(
            log_probs[d][r] for d, r in enumerate(ranks)
        )
        for depth in range(1, len(levels) + 1)
        for ranks in itertools.product(range(3), repeat=depth)
    }
    best = sorted((score for score in every.values() if score > -math.inf), reverse=True)
    found = [every[path] for path in paths(best_products(token_ids, log_probs, num_nodes))]
    assert found == pytest.approx(best[:num_nodes])


def test_best_products_of_one_candidate_each_are_a_chain() -> None:
    log_probs = [-0.1, -2.0, 0.0]
    found = best_products([[5], [6], [7]], [[each] for each in log_probs], 9)
    assert found == ([5, 6, 7], [-1, 0, 1], log_probs)


@given(seed=st.integers(0, 10_000), num_nodes=st.integers(1, 12))
def test_best_nodes_of_explored_tree_have_highest_scores(seed: int, num_nodes: int) -> None:
    rng = np.random.default_rng(seed)
    parents = np.array([int(rng.integers(-1, i)) if i else -1 for i in range(10)])
    scores = np.zeros(10, np.float32)
    for i, parent in enumerate(parents):
        above = scores[parent] if parent >= 0 else 0.0
        scores[i] = above - rng.choice([0.0, 0.5, 1.25, np.inf])  # equals and cuts, too
    tokens = np.arange(10)
    chosen, new_parents, log_probs = best_nodes(tokens, parents, scores, num_nodes)
    finite = sorted((float(score) for score in scores if score > -np.inf), reverse=True)
    assert [float(scores[token]) for token in chosen] == finite[:num_nodes]
    for token, parent in zip(chosen, new_parents, strict=True):
        assert parents[token] == (chosen[parent] if parent >= 0 else -1)
        assert parent < chosen.index(token)
    nodes = torch.from_numpy(np.stack((tokens, parents, scores.view(np.int32)))).int()
    ids, above, _ = beams.best_nodes(nodes[None], num_nodes)[0].tolist()
    size = len(chosen)
    assert (ids[:size], above[:size]) == (chosen, new_parents)
    assert {*zip(ids[size:], above[size:], strict=True)} <= {(ids[0], -1)}, "copies of the first"
    device_nodes = nodes_on_device(beams.best_nodes(nodes[None], 12), num_nodes)
    assert device_nodes.tokens[0].tolist() == ids
    chain = device_nodes.parents is None
    assert chain == (num_nodes == 1), "which small buckets hold"
    assert chain or device_nodes.parents[0].tolist() == above
    for token, log_prob in zip(chosen, log_probs, strict=True):
        assert log_prob == scores[token] - (scores[parents[token]] if parents[token] >= 0 else 0.0)


PARAMS = (
    SamplingParams(temperature=0.0, top_k=2),
    SamplingParams(temperature=1.0, seed=3),
    SamplingParams(temperature=0.7, top_k=5, seed=4),
    SamplingParams(temperature=1.5, top_p=0.6, seed=5),
    SamplingParams(temperature=1.0, min_p=0.2, seed=2**63),
)


def test_target_draws_of_any_logits_have_the_coupled_sample_first() -> None:
    torch.manual_seed(0)
    lengths = [11, 12, 13, 14, 15]
    draws = TargetDraws.of(PARAMS, lengths, CPU)
    for depth in range(20):
        logits = torch.randn(5, 2, 40) * 2
        tokens, log_probs = draws.likeliest(logits, depth, 40)
        batch = SamplingBatch.build(PARAMS, [length + depth for length in lengths])
        for place in range(2):
            assert tokens[:, place, 0].tolist() == sample(logits[:, place], batch).tolist()
        assert torch.all(log_probs[..., 1:] <= log_probs[..., :-1])
        torch.testing.assert_close(log_probs.exp().sum(-1), torch.ones(5, 2))
        torch.testing.assert_close(
            log_probs[0], logits[0].log_softmax(-1).gather(1, tokens[0])
        )  # greedy: no noise, no cuts
        assert torch.all((log_probs[2] > -torch.inf).sum(-1) == 5)  # top_k


def test_target_draws_of_several_rows_equal_each_alone() -> None:
    torch.manual_seed(1)
    logits = torch.randn(5, 1, 40)
    together = TargetDraws.of(PARAMS, [7] * 5, CPU).likeliest(logits, 2, 6)
    for i, params in enumerate(PARAMS):
        alone = TargetDraws.of([params], [7], CPU).likeliest(logits[i : i + 1], 2, 6)
        assert torch.equal(alone[0], together[0][i : i + 1])
        assert torch.equal(alone[1], together[1][i : i + 1])


def test_target_draws_of_paths_with_the_same_logits_need_no_copy_of_these() -> None:
    """DSpark without a Markov head hands such logits over; parameters cut them as any others."""
    torch.manual_seed(2)
    logits = torch.randn(5, 1, 40).expand(-1, 3, -1)
    draws = TargetDraws.of(PARAMS, [7] * 5, CPU)
    for found, copied in zip(
        draws.likeliest(logits, 1, 6), draws.likeliest(logits.contiguous(), 1, 6), strict=True
    ):
        assert torch.equal(found, copied)
