"""A proposer that can run ahead, told by turns to do so and not to: real streams, the same text."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from outrider.drafting.ahead.branches import EagerForks
from outrider.drafting.ahead.outcomes import Pace
from outrider.drafting.draft_model.proposer import DraftModelProposer
from outrider.drafting.proposer import DraftRound, SessionKey
from outrider.engine.policy.base import Policy
from outrider.engine.policy.mode import DraftMode
from outrider.engine.rounds import Round
from outrider.engine.sequence import Sequence as Row
from tests.support.hash_model import HashModel
from tests.support.reader_service import serving
from tests.support.scorer import MAX_LEN, VOCAB, running_scorer

SPELL = 40  # tokens


def ahead_at(length: int) -> bool:
    return length // SPELL % 2 == 0


class Spells(Policy):
    """Has drafts made ahead in every second spell of a text, and waits for them."""

    ahead = True

    def patience(self, seq: Row) -> float:  # noqa: ARG002
        return 1.0

    def round_done(self, seq: Row, round_: Round, wrong: bool, now: float) -> None:
        super().round_done(seq, round_, wrong, now)
        self.ahead = ahead_at(len(seq.token_ids))

    @property
    def way(self) -> DraftMode:
        return DraftMode.AHEAD if self.ahead else DraftMode.ON_DEMAND


class Watched(DraftModelProposer):
    """Writes down how long the text was whenever it drafted ahead."""

    def __init__(self) -> None:
        model = HashModel(VOCAB, num_pages=512, max_model_len=MAX_LEN)
        super().__init__(model, name="hash", fork_drafter=EagerForks(model), max_branches=4)
        self.lengths: list[int] = []

    def ahead(self, sessions: Sequence[SessionKey], pace: Pace) -> DraftRound:
        self.lengths += [len(self._sessions[key].follower.tokens) for key in sessions]
        return super().ahead(sessions, pace)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_proposer_runs_ahead_only_when_told_to(temperature: float) -> None:
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
