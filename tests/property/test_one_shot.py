"""Medusa heads and an MLP speculator in random schedules: the text is the target's alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outrider.config import EngineConfig
from outrider.drafting.branch_plan import NO_PACE, Pace
from outrider.drafting.heads.medusa import MedusaHead, MedusaWeights
from outrider.drafting.heads.mlp_speculator import MlpSpeculatorHead, SpeculatorStage
from outrider.drafting.one_shot import OneShotHead, OneShotProposer
from outrider.drafting.proposer import DraftRound, SessionKey
from outrider.engine.feature_streams import FeatureStreams
from outrider.engine.policy import Policy
from outrider.params import SamplingParams, StopParams
from outrider.types import Request
from tests.support.features import SIZE, FeatureHash
from tests.support.hash_model import HashModel, Sequential
from tests.support.one_shot_checkpoints import random as weight
from tests.support.simulation import VOCAB, Clock, Net, World

MAX_LEN, PAGE_SIZE, NUM_PAGES, DEPTH, INNER = 48, 4, 26, 3, 8
TRUTH = Sequential(HashModel(VOCAB, max_model_len=MAX_LEN))


class FeatureModel(FeatureHash, HashModel):
    """The target."""


class Counting(OneShotProposer):
    """Counts the nodes that it drafted."""

    nodes = 0

    def draft(self, sessions: Sequence[SessionKey], pace: Pace = NO_PACE) -> DraftRound:
        round_ = super().draft(sessions, pace)
        self.nodes += sum(len(tree.token_ids) for _, tree in round_.drafts)
        return round_


def medusa() -> OneShotHead:
    lm_heads = tuple([weight(VOCAB, SIZE, seed=i, std=0.02) for i in range(DEPTH)])
    return MedusaHead(MedusaWeights(((),) * DEPTH, lm_heads, VOCAB))


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
def test_text_is_that_of_no_speculation(
    make: Callable[[], OneShotHead], seed: int, k: int, width: int, budget: int, net: Net
) -> None:
    """With chunked prompts, preemptions, shared prefixes, broken streams."""
    rng = random.Random(seed)
    config = EngineConfig(
        page_size=PAGE_SIZE,
        num_pages=NUM_PAGES,
        max_num_seqs=3,
        max_num_batched_tokens=max(budget, k + 1),
        max_model_len=MAX_LEN,
        num_speculative_tokens=k,
    )
    model = FeatureModel(VOCAB, PAGE_SIZE, NUM_PAGES, MAX_LEN)
    streams = FeatureStreams(model.capture())
    policy = Policy(k, max_wait_s=rng.choice((0.0, 0.02)))
    world = World(policy, config, lambda n: 0.001 * (1 + n / 64), rng, model, streams)
    proposer = Counting(make(), method="medusa", name="test", tree_width=width)
    world.add((proposer, Clock()), net)
    prefix = tuple(rng.randrange(VOCAB) for _ in range(rng.randrange(20)))
    for session in range(5):
        prompt = (*prefix, *(rng.randrange(VOCAB) for _ in range(rng.randint(1, 8))))
        sampling = SamplingParams(temperature=rng.choice((0.0, 1.0)), seed=session)
        room = StopParams(max_tokens=rng.randint(1, MAX_LEN - len(prompt)))
        world.submit(Request(session, prompt, sampling=sampling, stop=room))
    world.run()
    for session, request in world.requests.items():
        tokens, _ = TRUTH.output(request, MAX_LEN, frozenset())
        assert world.committed[session][len(request.prompt_token_ids) :] == tokens
    longest = max(len(committed) for committed in world.committed.values())
    assert proposer.nodes > 0 or net != Net() or longest < 4
