"""Sessions that want no drafts for a while: followed for nothing, and drafted for at once again."""

from __future__ import annotations

from collections.abc import Sequence as Tokens

import pytest

from outrider.draft_tree import DraftTree
from outrider.drafting.proposer import SessionKey
from outrider.engine.sequence import Sequence
from outrider.policy.base import FixedPolicy, Ready
from outrider.policy.row import Drafting
from tests.support.models.features import CAPTURED, RowReader
from tests.support.services.reader_service import serving
from tests.support.services.scorer import MAX_LEN, VOCAB, running_scorer

SPELL = 70  # tokens without drafts, and as many with them: more than are held back


class Spells(FixedPolicy):
    """Drafts in every second spell of a text."""

    length = 0  # at most, when the step that is launched has ended: K is chosen for the next one

    def choose_rows(
        self, ready: list[Sequence], waiting: Tokens[Sequence], num_prefilling: int, now: float
    ) -> Ready:
        for seq in ready:
            self.length = len(seq.token_ids) + 1 + seq.drafting.num_draft_tokens
        return super().choose_rows(ready, waiting, num_prefilling, now)

    @property
    def stance(self) -> int:
        return self.length // SPELL % 2

    def choose_counts(self, rows: Tokens[Drafting]) -> list[int]:
        return [self.stance * count for count in super().choose_counts(rows)]

    @property
    def undrafted_sizes(self) -> frozenset[int]:
        return frozenset(range(20))


class Counting(RowReader):
    """Counts what it is told."""

    commits = 0

    def commit(
        self, session: SessionKey, base_len: int, tokens: Tokens[int], num_draft_tokens: int
    ) -> None:
        self.commits += 1
        super().commit(session, base_len, tokens, num_draft_tokens)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_proposer_after_a_time_without_drafts_has_every_token_and_state(
    temperature: float,
) -> None:
    prompt = [1, 2]
    length = MAX_LEN - len(prompt)  # no drafts, drafts, and none at the end
    async with running_scorer(features=CAPTURED, policy=Spells) as scorer:

        def make_draft(tokens: Tokens[int], k: int) -> DraftTree:
            return DraftTree.chain(len(tokens), scorer.model.greedy_text(tokens, k))

        plain = await scorer.generate(
            prompt, max_tokens=length, temperature=temperature, enabled=False
        )
        method = Counting(CAPTURED, make_draft, vocab_size=VOCAB)
        async with serving(scorer.address, method):
            await scorer.until(
                lambda: bool(scorer.hub.registry.proposers), "a proposer is attached"
            )
            output = await scorer.generate(prompt, max_tokens=length, temperature=temperature)
    assert output.token_ids == plain.token_ids
    aux = output.aux_info
    assert aux.k_histogram[0] >= MAX_LEN - SPELL - len(prompt) - 4, "the spells without"
    assert aux.drafted > 0
    assert (method.wrong, len(method.seen)) == (0, 1), "nothing was missing"
    assert method.rows_seen >= SPELL
    # Without drafts: 64 tokens, the rest with the wish for a draft, and what is left at the end.
    assert method.commits <= SPELL + 3
