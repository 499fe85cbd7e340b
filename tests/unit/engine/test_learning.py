"""What is learned from rows' rounds, and when their next drafts are chosen."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from outrider.config import EngineConfig
from outrider.draft_port import DraftOffer, PostedBlock
from outrider.draft_tree import DraftTree
from outrider.engine.engine import Engine
from outrider.params import SamplingParams, StopParams
from outrider.policy.adaptive import AdaptivePolicy
from outrider.policy.base import FixedPolicy
from outrider.policy.measurements import PRIOR_RATE
from outrider.policy.row import Drafting
from outrider.rounds import UNDRAFTED, USEFUL, Counters, chain_round
from outrider.rows.tracker import DraftTracker
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


def row_of(tracker: DraftTracker) -> Any:
    """Return a row with two tokens."""
    row = SimpleNamespace(drafting=tracker.start(Request(1, (1, 2))), token_ids=[1, 2])
    row.session_id, row.counters, row.draft, row.draft_base = 1, Counters(), None, 0
    return row


@pytest.mark.parametrize("colocated", [False, True])
def test_row_whose_first_draft_was_not_requested_asks_for_one_with_its_next_commit(
    colocated: bool,
) -> None:
    """Rounds are learned several at a time, and it must not wait for so many."""
    tracker = DraftTracker(AdaptivePolicy(4))
    row = row_of(tracker)
    tracker.attach(row, DraftOffer("a", 4, requested=colocated, colocated=colocated), 0.0)
    if colocated:
        tracker.withhold(row)
    assert row.drafting.num_draft_tokens == 0
    tracker.launched([(row, 0)], 0.5)
    assert row.drafting.num_draft_tokens == 4


def test_row_of_another_proposer_has_nothing_of_the_one_before() -> None:
    tracker = DraftTracker(AdaptivePolicy(4))
    tracker.attach(row := row_of(tracker), DraftOffer("a", 4), 0.0)
    d, kept = row.drafting, row.drafting.measured
    d.measured.accepted.add(0.0, 9.0)
    d.awaited.blocks, d.breaker.rounds_left = 5, 16
    tracker.attach(row, DraftOffer("a", 2), 1.0)
    assert (d.measured, d.awaited.blocks, d.breaker.rounds_left) == (kept, 5, 16), "it is the same"
    tracker.attach(row, DraftOffer("b", 4), 2.0)
    assert (d.measured.accepted.weight, d.awaited.blocks, d.breaker.rounds_left) == (0.0, 0, 0)
    assert d.kind == ("b ", d.offered.sampled)


@pytest.mark.parametrize("spell", [1, 4])
def test_each_method_of_a_proposer_is_learned_by_its_own_rounds(spell: int) -> None:
    """One row, whose rounds are learned several at a time: one method is right, the other wrong."""
    tracker = DraftTracker(policy := FixedPolicy(4))
    row = row_of(tracker)
    tracker.attach(row, DraftOffer("a", 4), 0.0)
    tracker.rounds_done([(row, UNDRAFTED, False)], now=0.0)
    for n in range(1, 41):
        right = n // spell % 2 == 0
        row.draft = draft = DraftTree.chain(len(row.token_ids), (7, 7, 7, 7))
        row.draft_base = draft.base_len
        method = "right" if right else "wrong"
        posted = PostedBlock(1, draft, "a", 1000, method=method)
        tracker.blocks_arrived([(row, posted, USEFUL, n - 0.5)])
        row.drafting.round.looked_at = n - 0.5
        row.drafting.num_draft_tokens = 3  # to see that it is chosen anew
        tracker.launched([(row, 4)], n - 0.5)
        row.draft = None
        row.token_ids += [7] * (1 + 4 * right)
        tracker.rounds_done([(row, chain_round(4, 4 * right), False)], now=float(n))
        if spell == 1:
            assert row.drafting.num_draft_tokens == 4, "another drafter has another length"
    one = Drafting(row.drafting.offered)
    for method, least, most in (("right", 0.9, 1.0), ("wrong", 0.0, 0.3)):
        one.drafter = f"a {method}"
        (survivals,) = policy.measured.acceptance.survivals([one], 1)
        assert least < survivals[0] < most


@pytest.mark.parametrize(("told_us", "draft_s"), [(2400, 0.0024), (2**32 - 1, 0.003)])
def test_drafting_time_that_a_proposer_tells_is_believed_within_the_delay(
    told_us: int, draft_s: float
) -> None:
    """And a copy of a block, which comes at once, has taken none."""
    tracker = DraftTracker(FixedPolicy(4))
    row = row_of(tracker)
    tracker.attach(row, DraftOffer("a", 4), 0.0)
    row.token_ids += [7]
    tracker.rounds_done([(row, UNDRAFTED, False)], now=1.0)
    posted = PostedBlock(1, DraftTree.chain(3, (7, 7)), "a", told_us)
    for _copy in range(2):
        tracker.blocks_arrived([(row, posted, USEFUL, 1.003)])
    assert row.counters.propose_s == pytest.approx(draft_s)
    assert row.counters.network_s == pytest.approx(0.003 - draft_s)


def test_late_draft_is_measured_from_its_commit_after_a_round_of_a_stop_token_alone() -> None:
    """Such a round adds nothing to the text, and ends when the draft has come."""
    tracker = DraftTracker(FixedPolicy(4))
    row = row_of(tracker)
    tracker.attach(row, DraftOffer("a", 4), 0.0)
    row.token_ids += [7]
    tracker.rounds_done([(row, UNDRAFTED, False)], now=1.0)
    tracker.rounds_done([(row, UNDRAFTED, False)], now=1.01)
    posted = PostedBlock(1, DraftTree.chain(3, (7, 7)), "a", 1000)
    tracker.blocks_arrived([(row, posted, USEFUL, 1.004)])
    assert row.counters.propose_s == pytest.approx(0.001)
    assert row.counters.network_s == pytest.approx(0.003)
