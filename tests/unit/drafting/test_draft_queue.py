"""The books about sessions that want a draft."""

from __future__ import annotations

from outrider.draft_tree import DraftTree
from outrider.drafting.copying.ngram import NgramProposer
from outrider.drafting.draft_queue import DraftQueue
from outrider.drafting.proposer import SessionStart
from outrider.params import SamplingParams
from tests.support.models.features import CAPTURED, RowReader
from tests.support.services.scorer import VOCAB

ROW = bytes(CAPTURED.row_bytes)


def start(*prefix: int, k: int = 2) -> SessionStart:
    return SessionStart(prefix, SamplingParams(temperature=0), k, max_len=100)


def test_draft_queue_with_several_sessions_keeps_their_order() -> None:
    queue = DraftQueue(NgramProposer())
    keys = [queue.new_key() for _ in range(3)]
    for key in keys:
        queue.open(key, start(1, 2, 3))
    queue.answered(keys[0])
    queue.commit(keys[1], 3, [4], 0)
    queue.commit(keys[0], 3, [4], 2)
    assert [*queue.wanting] == [keys[2], keys[0]]


def test_draft_queue_after_end_of_session_forgets_it() -> None:
    proposer = NgramProposer()
    queue = DraftQueue(proposer)
    for end in (queue.close, queue.forget, proposer.close):
        queue.open(key := queue.new_key(), start(1, 2, 3))
        end(key)
        queue.drop(key)
        assert (queue.wanting, proposer.num_sessions) == ({}, 0)
        queue.unfinished(key)


def test_draft_queue_without_rows_waits_until_more_come() -> None:
    reader = RowReader(
        CAPTURED, lambda tokens, _: DraftTree.chain(len(tokens), ()), vocab_size=VOCAB
    )
    queue = DraftQueue(reader)
    queue.open(key := queue.new_key(), start(1, 2, 3))
    queue.features(key, 0, ROW)
    queue.unfinished(key)
    assert not queue.wanting
    queue.features(key, 1, ROW)
    assert [*queue.wanting] == [key], "it asks again for each part"
    queue.unfinished(key)
    assert [*queue.wanting] == [key], "all rows have come: the method goes on by itself"
