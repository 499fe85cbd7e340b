"""A proposer that can run ahead, told by turns to do so and not to: real streams, the same text."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from outrider.drafting.draft_model.loops import EagerForks
from outrider.drafting.draft_model.proposer import DraftModelProposer
from outrider.drafting.proposer import DraftRound, Pace, ProposerLimits, SessionKey
from outrider.engine.sequence import Sequence as Row
from outrider.policy.base import DraftMode, FixedPolicy, Ready
from tests.support.models.hash_model import HashModel
from tests.support.services.reader_service import serving
from tests.support.services.scorer import MAX_LEN, VOCAB, running_scorer

SPELL = 40  # tokens


def ahead_at(length: int) -> bool:
    return length // SPELL % 2 == 0


class Spells(FixedPolicy):
    """Has drafts made ahead in every second spell of a text, and waits for them."""

    ahead = True

    def patience_s(self, seq: Row) -> float:  # noqa: ARG002
        return 1.0

    def choose_rows(
        self, ready: list[Row], waiting: Sequence[Row], num_prefilling: int, now: float
    ) -> Ready:
        for seq in (*ready, *waiting):
            self.ahead = ahead_at(len(seq.token_ids))
        return super().choose_rows(ready, waiting, num_prefilling, now)

    @property
    def mode(self) -> DraftMode:
        return DraftMode.AHEAD if self.ahead else DraftMode.ON_DEMAND


class Watched(DraftModelProposer):
    """Writes down how long the text was whenever it drafted ahead."""

    def __init__(self) -> None:
        model = HashModel(VOCAB, num_pages=512, max_model_len=MAX_LEN)
        limits = ProposerLimits(max_branches=4)
        super().__init__(model, name="hash", limits=limits, fork_drafter=EagerForks(model))
        self.lengths: list[int] = []

    def ahead(self, sessions: Sequence[SessionKey], pace: Pace) -> DraftRound:
        self.lengths += [len(self._sessions[key].follower.tokens) for key in sessions]
        return super().ahead(sessions, pace)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_proposer_when_drafts_are_on_demand_drafts_nothing_ahead(temperature: float) -> None:
    prompt, method = [1, 2], Watched()
    length = MAX_LEN - len(prompt)
    async with running_scorer(pause_s=0.01, policy=Spells) as scorer:
        plain = await scorer.generate(
            prompt, max_tokens=length, temperature=temperature, enabled=False
        )
        async with serving(scorer.address, method):
            await scorer.until(
                lambda: bool(scorer.hub.registry.proposers), "a proposer is attached"
            )
            output = await scorer.generate(prompt, max_tokens=length, temperature=temperature)
    assert output.token_ids == plain.token_ids
    assert output.aux_info.accepted > 0.5 * length
    late = 2 * 5  # tokens of the round that says so, and of the one that is on its way
    assert {n // SPELL for n in method.lengths} >= {0, 2}
    assert all(ahead_at(n) or n % SPELL < late for n in method.lengths)
