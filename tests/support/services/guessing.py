"""Proposers that agree with the scorer of tests/support/services/scorer.py on most tokens."""

from __future__ import annotations

from outrider.drafting.draft_model.proposer import DraftModelProposer
from tests.support.models.hash_model import HashModel
from tests.support.services.scorer import MAX_LEN, VOCAB, RunningScorer
from tests.support.services.scripted_proposer import ScriptedProposer, follow, hello


def guessing(scorer: RunningScorer, name: str = "proposer-0") -> ScriptedProposer:
    """Scripted: what comes next."""

    script = follow(lambda tokens: scorer.model.greedy_text(tokens, 4))
    return ScriptedProposer(scorer.stub, script, hello(proposer_id=name))


def draft_model() -> DraftModelProposer:
    """A method with the scorer's own model, to be served by `reader_service`."""
    model = HashModel(VOCAB, num_pages=512, max_model_len=MAX_LEN)
    return DraftModelProposer(model, name="hash")
