"""What a round's drafts travel in: messages that a scorer reads, however many sessions it has."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from prometheus_client import CollectorRegistry

from outrider.draft_tree import MAX_DRAFT_PROBS, DraftProbs, DraftTree
from outrider.drafting.building.loops import _FORK_ROWS
from outrider.drafting.copying.ngram import NgramProposer
from outrider.drafting.proposer import NO_PACE, DraftRound, LoopRun, Pace, SessionKey
from outrider.params import MAX_SPECULATIVE_TOKENS
from outrider.rpc.channel import MAX_MESSAGE_BYTES
from outrider.rpc.telemetry import configure
from outrider.v1 import draft_pb2
from proposer_service.cycle import Attach, Batch, Cycle
from proposer_service.metrics import ProposerMetrics
from tests.support.services.draft_scorer import open_

TOKEN = 2**31 - 1
DRAWN_FROM = DraftProbs(
    tuple(range(TOKEN, TOKEN - MAX_DRAFT_PROBS, -1)), (1 / MAX_DRAFT_PROBS,) * MAX_DRAFT_PROBS
)


class Drawing(NgramProposer):
    """Drafts the same token again and again, drawn from `drawn_from`."""

    drawn_from: DraftProbs | None = None

    def draft(self, sessions: Sequence[SessionKey], pace: Pace = NO_PACE) -> DraftRound:  # noqa: ARG002
        k = MAX_SPECULATIVE_TOKENS
        probs = () if self.drawn_from is None else (self.drawn_from,) * k
        return DraftRound([(key, DraftTree.chain(3, (TOKEN,) * k, probs)) for key in sessions])


@pytest.mark.parametrize(("drawn_from", "num_sessions"), [(DRAWN_FROM, 80), (None, 17_000)])
def test_cycle_with_too_many_drafts_for_a_message_sends_several(
    drawn_from: DraftProbs | None, num_sessions: int
) -> None:
    proposer = Drawing(max_sessions=num_sessions)
    proposer.drawn_from = drawn_from
    cycle = Cycle(proposer, ProposerMetrics(CollectorRegistry()), configure("proposer"))
    sent: list[draft_pb2.DraftRequest] = []
    opens = [open_(i, [1, 2, 3]) for i in range(num_sessions)]
    batch = Batch(1, draft_pb2.SessionBatch(opens=opens), 0.0)
    cycle.apply([Attach(1, sent.extend, MAX_SPECULATIVE_TOKENS), batch])
    cycle.draft()
    blocks = [block for each in sent for block in each.blocks.blocks]
    assert [block.session for block in blocks] == [*range(num_sessions)]
    assert max(each.ByteSize() for each in sent) < MAX_MESSAGE_BYTES / 2
    assert max(len(each.blocks.blocks) for each in sent) <= 2**14, "more are malformed"


def test_loops_of_any_number_of_rows_are_few_series() -> None:
    """A model that captures no loops runs any number of rows; the captured ones stay apart."""
    registry = CollectorRegistry()
    metrics = ProposerMetrics(registry)
    for rows in range(1, 1025):
        metrics.loop(LoopRun(0, rows, rows, 4, 0.01))
    (seconds,) = [each for each in registry.collect() if each.name.endswith("loop_seconds")]
    series = {int(each.labels["rows"]) for each in seconds.samples}
    assert len(series) == 20
    assert series >= {*_FORK_ROWS}
