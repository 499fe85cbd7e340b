"""Medusa heads and an MLP speculator in random schedules: the text is the target's alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outrider.drafting.hidden_states.heads.base import OneShotHead
from outrider.drafting.hidden_states.heads.medusa import MedusaHead
from outrider.drafting.hidden_states.heads.mlp_speculator import MlpSpeculatorHead, SpeculatorStage
from outrider.drafting.hidden_states.one_shot import OneShotProposer
from outrider.drafting.proposer import NO_PACE, DraftRound, Pace, ProposerLimits, SessionKey
from tests.support.checkpoints.one_shot_checkpoints import random as weight
from tests.support.models.features import SIZE
from tests.support.simulators.feature_world import feature_world, run_random_requests
from tests.support.simulators.methods import VOCAB, Clock, Net

DEPTH, INNER = 3, 8


class Counting(OneShotProposer):
    """Counts the nodes that it drafted."""

    nodes = 0

    def draft(self, sessions: Sequence[SessionKey], pace: Pace = NO_PACE) -> DraftRound:
        round_ = super().draft(sessions, pace)
        self.nodes += sum(len(tree.token_ids) for _, tree in round_.drafts)
        return round_


def medusa() -> OneShotHead:
    lm_heads = [weight(VOCAB, SIZE, seed=i, std=0.02) for i in range(DEPTH)]
    return MedusaHead(((),) * DEPTH, lm_heads, VOCAB)


def mlp_speculator() -> OneShotHead:
    stages = [
        SpeculatorStage(
            emb=weight(VOCAB, INNER, seed=i),
            proj=weight(INNER, INNER if i else SIZE, seed=i + 10),
            ln_weight=weight(INNER, seed=i + 20),
            ln_bias=weight(INNER, seed=i + 30),
            head=weight(VOCAB, INNER, seed=i + 40),
        )
        for i in range(DEPTH)
    ]
    return MlpSpeculatorHead(stages, scale_input=True)


@pytest.mark.parametrize("make", [medusa, mlp_speculator])
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 2**16),
    k=st.integers(1, 12),
    width=st.sampled_from((1, 3, 8)),
    budget=st.sampled_from((4, 16, 64)),
    net=st.sampled_from((Net(), Net(delay_s=0.01, jitter_s=0.02), Net(break_chance=0.05))),
)
def test_one_shot_heads_under_any_schedule_keep_the_plain_text(
    make: Callable[[], OneShotHead], seed: int, k: int, width: int, budget: int, net: Net
) -> None:
    """With chunked prompts, preemptions, shared prefixes, broken streams."""
    world = feature_world(random.Random(seed), k, (0.0, 0.02), max(budget, k + 1))
    limits = ProposerLimits(tree_width=width)
    proposer = Counting(make(), method="medusa", name="test", limits=limits)
    world.add((proposer, Clock()), net)
    run_random_requests(world)
    longest = max(len(committed) for committed in world.committed.values())
    assert proposer.nodes > 0 or net != Net() or longest < 4
