"""Drafts are filled up where vLLM runs a step of equal lengths in one CUDA graph."""

from __future__ import annotations

import numpy as np
import pytest

from outrider.policy.measurements import PRIOR_RATE
from outrider.vllm.draft_host import DraftHost
from outrider.vllm.waiting import LockstepPolicy
from tests.support.services.vllm_steps import K, VllmSteps, truth


def run(steps: VllmSteps, num_steps: int, length: int) -> None:
    """Draft `length` right tokens for row "a" alone, in each step."""
    proposer = steps.attach()
    for _ in range(num_steps):
        steps.step()
        steps.post(proposer, steps.block("a", length))
    assert all(
        text[i] == truth(name, i) for name, text in steps.texts.items() for i in range(len(text))
    )


async def test_host_when_one_row_has_a_draft_fills_up_all(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = VllmSteps(monkeypatch, max_graph_rows=2)
    proposer = steps.attach()
    assert steps.step() == {"a": [], "b": []}  # nobody drafts: one token a row
    steps.post(proposer, steps.block("a", 2))
    drafts = steps.step()
    base = len(steps.texts["a"])
    assert {name: len(draft) for name, draft in drafts.items()} == {"a": K, "b": K}
    assert drafts["a"][0] == truth("a", base)


async def test_host_with_more_rows_than_graphs_have_fills_up_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps = VllmSteps(monkeypatch, max_graph_rows=1)
    proposer = steps.attach()
    steps.step()
    steps.post(proposer, steps.block("a", 3))
    assert {name: len(draft) for name, draft in steps.step().items()} == {"a": 2, "b": 0}


@pytest.mark.parametrize("length", [1, 2, K])
async def test_host_that_fills_up_counts_only_what_was_drafted(
    monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    filled, ragged = (VllmSteps(monkeypatch, max_graph_rows=rows) for rows in (2, 0))
    counted = []
    for steps in (filled, ragged):
        run(steps, 6, length)
        counted.append({name: steps.host.take_stats(name) for name in ("a", "b")})
    for name in ("a", "b"):
        got, expected = (stats[name] for stats in counted)
        assert got is not None
        assert expected is not None
        assert (got.drafted, got.accepted) == (expected.drafted, expected.accepted)
        assert got.rounds == expected.rounds


async def test_host_counts_a_filling_token_that_was_right(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = VllmSteps(monkeypatch, max_graph_rows=2)
    proposer = steps.attach()
    steps.step()
    steps.post(proposer, steps.block("a", 2))
    steps.step()
    base = len(steps.texts["b"])
    steps.drafts["b"] = [truth("b", base), *steps.drafts["b"][1:]]
    steps.step()
    steps.finished = ["b"]
    steps.step("a")
    stats = steps.host.take_stats("b")
    assert stats is not None
    assert (stats.drafted, stats.accepted) == (1, 1)


def test_policy_of_host_that_fills_up_knows_that_one_draft_token_costs_as_much_as_all() -> None:
    policy = LockstepPolicy(K)
    DraftHost(K, 64, 8, policy=policy, max_graph_rows=2)
    steps, times = policy.measured.steps, {2: 0.010, 2 * (1 + K): 0.014, 3: 0.011}
    for num_tokens, seconds in times.items():
        steps.observe_step(3 if num_tokens == 3 else 2, num_tokens, seconds)
    estimates = steps.of_rows(2, np.array([2.0, 3.0, 2.0 * (1 + K)]))
    assert estimates.tolist() == pytest.approx([0.010, 0.014, 0.014])
    assert steps.of_rows(3, np.array([4.0]))[0] < 0.014  # no graph has as many rows


async def test_rounds_of_a_request_that_ends_soon_are_learned_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps = VllmSteps(monkeypatch)
    run(steps, 3, 2)
    steps.finished += ["a", "b"]
    steps.step()
    kinds = steps.host.tracker.policy.measured.acceptance._kinds
    assert [kind.rate > PRIOR_RATE for kind in kinds.values()] == [True]
