"""`--speculation-policy off`: a proposer may attach and draft, and nothing comes of it."""

from __future__ import annotations

from outrider.config import SPECULATION_POLICIES, EngineConfig
from outrider.draft_port import DraftOffer, PostedBlock
from outrider.draft_tree import DraftTree
from outrider.engine.engine import Engine
from outrider.params import SamplingParams, SpeculationParams, StopParams
from outrider.policy.base import DraftMode
from outrider.types import Request
from scorer_service.core import POLICIES
from tests.support.models.hash_model import HashModel

PROMPT, LENGTH = (1, 2, 3), 40


def test_off_policy_with_attached_proposer_verifies_nothing() -> None:
    model = HashModel(num_pages=64, max_model_len=64)
    config = EngineConfig(page_size=4, num_pages=64, max_model_len=64, num_speculative_tokens=4)
    engine = Engine(model, config, policy=POLICIES["off"](4))
    text = (*PROMPT, *model.greedy_text(PROMPT, LENGTH))
    for session in (1, 2):  # the second one asks for drafts of its own length
        speculation = SpeculationParams(num_speculative_tokens=None if session == 1 else 2)
        sampling, stop = SamplingParams(temperature=0.0), StopParams(max_tokens=LENGTH)
        engine.submit(Request(session, PROMPT, sampling, stop, speculation))
        assert session.bit_length() in engine.snapshot().undrafted_sizes, "nobody asks for drafts"
        engine.set_drafting(session, DraftOffer("eager", 4))
    commits = []
    while engine.snapshot().running or engine.snapshot().waiting:
        for session in (1, 2):
            if (tokens := engine.committed(session)) is not None:
                block = DraftTree.chain(len(tokens), text[len(tokens) : len(tokens) + 4])
                engine.post_block(PostedBlock(session, block, "eager", 1))
        events = engine.step()
        assert events is not None, "a row waits for a draft"
        assert events.counts is not None
        assert events.counts.way == DraftMode.OFF.value
        commits += events.commits
    assert all(commit.num_draft_tokens == 0 for commit in commits)
    ends = [commit.stats for commit in commits if commit.stats is not None]
    assert len(ends) == 2
    for stats in ends:
        assert (stats.rounds, stats.drafted, stats.waits, stats.fallback_rounds) == (
            LENGTH,
            0,
            0,
            0,
        )


def test_every_policy_of_the_flag_is_built() -> None:
    assert set(POLICIES) == set(SPECULATION_POLICIES)
