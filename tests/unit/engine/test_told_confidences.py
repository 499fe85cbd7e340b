"""Confidences of draft tokens: how they are told, by which rules looked at, and what is cut."""

from __future__ import annotations

import random
from collections.abc import Sequence as Rows

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.config import EngineConfig
from outrider.draft_port import DraftOffer
from outrider.draft_tree import DraftTree
from outrider.drafted_nodes import DraftNodes
from outrider.drafting.confidence import confidences_of
from outrider.engine.sequence import Sequence
from outrider.engine.step import ChosenDraft, Step, choose_draft
from outrider.params import (
    SamplingParams,
    SpeculationParams,
    StopParams,
    Verification,
    VerificationRule,
)
from outrider.policy.adaptive import AdaptivePolicy
from outrider.policy.base import Policy
from outrider.policy.row import Drafting, Offered
from outrider.types import Request
from outrider.vllm.hosted_row import HostedRow
from tests.support.models.hash_model import HashModel
from tests.support.models.hash_trees import HashTrees
from tests.support.simulators.methods import VOCAB, Clock, Net, draft_model
from tests.support.simulators.simulation import World


def test_confidences_of_unlike_gaps_rise_and_stay_within_a_byte() -> None:
    told = confidences_of(np.array([0.0, 0.01, 0.5, 2.0, 20.0, np.inf], np.float32))
    assert list(told) == sorted(told)
    assert (told[0], told[-1]) == (1, 255)
    assert told[3] == round(128 + 16 * np.log(np.expm1(2.0)))


@pytest.mark.parametrize(
    "rule", [VerificationRule.COUPLED, VerificationRule.REJECTION, VerificationRule.BLOCK]
)
def test_confidences_choose_nothing_under_rules_that_look_at_drafts(rule: VerificationRule) -> None:
    """Under rejection sampling a cut by the draft's own tokens would change the text's law."""
    request = Request(
        1,
        (1, 2),
        SamplingParams(temperature=1.0, seed=1),
        StopParams(max_tokens=8),
        SpeculationParams(verification=Verification(rule)),
    )
    seq = Sequence(
        request,
        max_len=10,
        stop_ids=frozenset(),
        drafting=Drafting(Offered(4, False, DraftOffer("a", 4))),
        submitted_at=0.0,
    )
    seq.take_block(DraftTree.chain(2, (3, 4), (), bytes((200, 90))))
    hosted = HostedRow("a", request, seq.drafting, max_len=10, stop_ids=frozenset(), started_at=0.0)
    hosted.take_block(DraftTree.chain(2, (3, 4), (), bytes((200, 90))))
    hosted.num_drafted = 2
    for told in (choose_draft(seq, 4).confidences, hosted.nodes.confidences):
        assert told == (bytes((200, 90)) if rule is VerificationRule.COUPLED else b"")


@given(st.data())
def test_draft_of_any_kept_nodes_is_the_tree_without_the_others(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 12))
    parents = tuple([data.draw(st.integers(-1, i - 1)) for i in range(size)])
    wanted = [data.draw(st.booleans()) for _ in range(size)]
    kept: list[bool] = []
    for want, parent in zip(wanted, parents, strict=True):
        kept.append(want and (parent < 0 or kept[parent]))
    chosen = ChosenDraft(tuple(range(size)), parents, (), bytes(range(size))).kept(kept)
    rest = DraftTree(0, chosen.token_ids, chosen.parents or tuple(range(-1, sum(kept) - 1)))
    assert list(chosen.token_ids) == [i for i in range(size) if kept[i]]
    assert list(chosen.confidences) == list(chosen.token_ids)
    for node, parent in zip(rest.token_ids, rest.parents, strict=True):
        assert (-1 if parent < 0 else rest.token_ids[parent]) == parents[node]
    assert all(kept) or bool(chosen.parents) == (not rest.is_chain)


class Cutting(AdaptivePolicy):
    """Without trials of other modes."""

    may_wait = True
    drafting = True


class Whole(Cutting):
    """Verifies trees as they come, whose length follows from acceptance by depth."""

    def cut(self, drafts: Rows[tuple[Drafting, DraftNodes]], *counts: int) -> list[bool]:
        return Policy.cut(self, drafts, *counts)


def world_of(policy: Policy, model: HashModel, seconds: Rows[float]) -> World:
    """Steps of 1, 5, 16, 32 and 128 tokens take so many `seconds`."""
    k = policy.num_speculative_tokens
    config = EngineConfig(16, 2048, max_num_seqs=16, max_model_len=512, num_speculative_tokens=k)

    def step_s(step: Step) -> float:
        return float(np.interp(step.num_tokens, (1, 5, 16, 32, 128), seconds))

    return World(policy, config, step_s, random.Random(1), model)


def answered(policy: Policy, *, lies: bool = False, chains: bool = False) -> World:
    """Sixteen texts drafted for by trees, with the step times of an embedded target on a CPU."""
    model, clock = HashModel(VOCAB, 16, 2048, 512), Clock()
    world = world_of(policy, model, (0.026, 0.044, 0.057, 0.076, 0.228))
    trees = HashTrees(clock, model, eps=0.3, lies=lies), clock
    world.add(draft_model(max_branches=0) if chains else trees, Net(), own_device=not chains)
    for i in range(1, 17):
        temperature = 1.0 if chains else float(i % 2)
        sampling, stop = SamplingParams(temperature, seed=i), StopParams(100 if chains else 60)
        world.begin(Request(i, (i, 1), sampling, stop, SpeculationParams()))
    world.run()
    return world


def counted(world: World) -> tuple[int, int]:
    """Draft tokens that were verified, and those accepted."""
    stats = [last.stats for last in world.last.values() if last.stats is not None]
    return sum(each.drafted for each in stats), sum(each.accepted for each in stats)


def test_unlikely_branches_of_trees_are_left_out_where_tokens_take_time() -> None:
    """Fewer nodes of like trees are verified, and a larger share of them is right."""
    cut, whole, lied = answered(Cutting(16)), answered(Whole(16)), answered(Cutting(16), lies=True)
    assert whole.now > 1.05 * cut.now
    (drafted, accepted), (of_all, accepted_of_all) = counted(cut), counted(whole)
    assert drafted < 0.8 * of_all
    assert accepted * of_all > 1.2 * accepted_of_all * drafted
    assert cut.committed == whole.committed == lied.committed, "a liar costs speed alone"
    assert counted(lied)[1] > 0, "and is not left out for good"


def test_unlikely_tokens_of_chains_are_left_out_where_tokens_take_time() -> None:
    cut, whole = answered(Cutting(4), chains=True), answered(Whole(4), chains=True)
    assert whole.now > 1.015 * cut.now


def test_rows_that_nobody_drafts_for_fill_no_half_of_those_that_wait_in_turns() -> None:
    """A half has the rows that waited longest: others' waits began anew with each token, too."""
    model = HashModel(VOCAB, 16, 2048, 512)
    world = world_of(Cutting(4), model, (0.006, 0.0075, 0.010, 0.015, 0.045))
    world.add(draft_model(0.1, 0.0025, max_branches=0), Net(0.002), own_device=True)
    for i in range(1, 17):
        sampling, speculation = SamplingParams(seed=i), SpeculationParams(enabled=not i % 2)
        world.begin(Request(i, (i, 1), sampling, StopParams(400), speculation))
    world.run(1.5)
    drafted, others = ([len(world.committed[i]) for i in range(n, 17, 2)] for n in (2, 1))
    assert min(drafted) > 0.5 * max(others)
