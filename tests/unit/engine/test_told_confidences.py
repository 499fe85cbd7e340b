"""Confidences of draft tokens: how they are told, and by which rules they may be looked at."""

from __future__ import annotations

import numpy as np
import pytest

from outrider.draft_port import DraftOffer
from outrider.draft_tree import DraftTree
from outrider.drafting.confidence import confidences_of
from outrider.engine.sequence import Sequence
from outrider.engine.step import draft_confidences
from outrider.params import (
    SamplingParams,
    SpeculationParams,
    StopParams,
    Verification,
    VerificationRule,
)
from outrider.policy.row import Drafting, Offered
from outrider.types import Request


def test_confidences_of_unlike_gaps_rise_and_stay_within_a_byte() -> None:
    told = confidences_of(np.array([0.0, 0.01, 0.5, 2.0, 20.0, np.inf], np.float32))
    assert list(told) == sorted(told)
    assert (told[0], told[-1]) == (1, 255)
    assert told[3] == round(128 + 16 * np.log(np.expm1(2.0)))


@pytest.mark.parametrize("rule", [VerificationRule.COUPLED, VerificationRule.REJECTION])
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
    told = draft_confidences(seq, 4)
    assert told == (bytes((200, 90)) if rule is VerificationRule.COUPLED else b"")
