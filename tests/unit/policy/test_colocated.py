"""Drafts that are made between an engine's steps: there when a row is looked at, and not free."""

from __future__ import annotations

import pytest

from outrider.config import EngineConfig
from outrider.draft_port import DraftOffer, PostedBlock
from outrider.draft_tree import DraftTree
from outrider.engine.engine import Engine
from outrider.params import SamplingParams, SpeculationParams, StopParams
from outrider.policy.adaptive import AdaptivePolicy
from outrider.types import Request
from tests.support.models.hash_model import HashModel
from tests.support.simulators.simulation import Clock

ROUNDS = 12
STEP_S, DRAFT_S = 0.002, 0.0005


@pytest.mark.parametrize("colocated", [True, False])
def test_colocated_drafts_that_are_at_hand_are_not_free(colocated: bool) -> None:
    model, clock = HashModel(num_pages=64, max_model_len=200), Clock()
    config = EngineConfig(page_size=4, num_pages=64, max_model_len=200)
    engine = Engine(model, config, policy=AdaptivePolicy(4), clock=clock)
    prompt = (1, 2, 3)
    engine.submit(
        Request(1, prompt, SamplingParams(temperature=0), StopParams(150), SpeculationParams())
    )
    text = [*prompt, *model.greedy_text(prompt, 150)]
    engine.set_drafting(1, DraftOffer("here", 4, colocated=colocated, requested=False))
    drafting = engine._scheduler.by_session[1].drafting
    for _ in range(ROUNDS):
        engine.launch()
        clock.now += STEP_S
        engine.collect()
        length = len(engine.committed(1) or ())
        if drafting.num_draft_tokens:
            clock.now += DRAFT_S
            draft = DraftTree.chain(length, text[length : length + 4])
            engine.post_block(PostedBlock(1, draft, "here", round(DRAFT_S * 1e6)))
        engine.finalize_step()
    assert drafting.measured.hit, "it was there"
    assert (drafting.measured.free_hits.mean > 0.5) != colocated
