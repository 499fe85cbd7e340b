"""What is learned from the rounds of requests that do not end by themselves."""

from __future__ import annotations

from outrider.config import EngineConfig
from outrider.draft_port import DraftOffer, PostedBlock
from outrider.draft_tree import DraftTree
from outrider.engine.engine import Engine
from outrider.params import SamplingParams, StopParams
from outrider.policy.base import FixedPolicy
from outrider.policy.measurements import PRIOR_RATE
from outrider.types import Request
from tests.support.models.hash_model import HashModel


def test_rounds_of_a_request_that_is_aborted_soon_are_learned_from() -> None:
    """As at a stop string, which the gateway finds."""
    model, policy = HashModel(), FixedPolicy(2, max_wait_s=1.0)
    config = EngineConfig(page_size=4, num_pages=64, max_model_len=64, num_speculative_tokens=2)
    engine = Engine(model, config, policy=policy)
    request = Request(0, (1, 2, 3), SamplingParams(temperature=0.0), StopParams(max_tokens=40))
    engine.submit(request)
    engine.set_drafting(0, DraftOffer("a", 2))
    engine.step()
    for _ in range(3):
        text = engine.committed(0) or ()
        draft = DraftTree.chain(len(text), model.greedy_text(text, 2))
        engine.post_block(PostedBlock(0, draft, "a", 5))
        engine.step()
    engine.abort(0)
    [kind] = policy.measured.acceptance._kinds.values()
    assert kind.rate > PRIOR_RATE
