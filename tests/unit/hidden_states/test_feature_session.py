"""Sessions and feature rows of methods that read hidden states."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outrider.drafting.hidden_states.session import FeatureMethod, FeatureSession
from outrider.drafting.proposer import (
    NO_PACE,
    DraftRound,
    Pace,
    ProposerTraits,
    SessionKey,
    SessionStart,
)
from outrider.features import FeatureSpec
from outrider.params import SamplingParams
from tests.support.checkpoints.eagle_checkpoints import as_bytes

WIDTH = 4
ROWS = torch.arange(30 * WIDTH, dtype=torch.bfloat16).view(30, WIDTH)
GREEDY = SamplingParams(temperature=0.0)


class Keeping(FeatureMethod):
    """Forgets nothing by itself, and says who was asked."""

    def draft(self, sessions: Sequence[SessionKey], pace: Pace = NO_PACE) -> DraftRound:  # noqa: ARG002
        return DraftRound(lost=self._take_lost(), unfinished=[s.key for s in self._asked(sessions)])

    def state(self, session: SessionKey) -> FeatureSession:
        return self._sessions[session]


def _method(*, max_rows: int = 1000, max_sessions: int = 8) -> Keeping:
    traits = ProposerTraits(
        method="eagle",
        model="m",
        vocab_size=100,
        max_sessions=max_sessions,
        max_draft_tokens=4,
        max_model_len=20,
        features=FeatureSpec(WIDTH, final_norm=True),
    )
    return Keeping(traits, max_feature_bytes=max_rows * WIDTH * 2)


def _send(method: Keeping, session: SessionKey, start: int, end: int) -> None:
    method.features(session, start, as_bytes(ROWS[start:end]))


def test_feature_session_with_rows_in_parts_returns_any_range() -> None:
    method = _method()
    method.open(1, SessionStart(range(12), GREEDY, 4, 20))
    for start, end in ((0, 3), (1, 4), (2, 3), (4, 4), (4, 11)):  # with repeats, and with nothing
        _send(method, 1, start, end)
    state = method.state(1)
    assert (state.first, state.end, state.num_rows) == (0, 11, 11)
    assert state.ready
    for start, end in ((0, 11), (2, 5), (3, 4), (10, 11)):
        assert torch.equal(state.rows(start, end), ROWS[start:end])
    for before in (2, 2, 5, 1):
        state.forget(before)
        assert torch.equal(state.rows(state.first, 11), ROWS[state.first : 11])
    assert state.first == 5
    state.forget(99)
    assert state.first == state.end == 11
    _send(method, 1, 11, 13)  # the next ones
    assert torch.equal(state.rows(11, 13), ROWS[11:13])


def test_feature_session_with_all_rows_is_ready() -> None:
    method = _method()
    method.open(1, SessionStart([1], GREEDY, 4, 20))
    state = method.state(1)
    assert not state.ready  # a text of one token has no row that a draft can begin after
    _send(method, 1, 0, 1)
    assert not state.ready
    method.commit(1, 1, [7], 4)
    assert state.ready
    method.commit(1, 2, [8, 9], 4)
    assert not state.ready
    assert state.num_rows == 1
    _send(method, 1, 1, 3)
    assert state.ready


def test_feature_method_with_gap_or_partial_row_loses_session() -> None:
    method = _method()
    for key in (1, 2, 3):
        method.open(key, SessionStart(range(5), GREEDY, 4, 20))
    _send(method, 1, 1, 3)
    method.features(2, 0, as_bytes(ROWS[:2])[:-1])
    method.features(9, 0, b"?")  # nobody's
    done = method.draft([1, 2, 3])
    assert done.lost == [1, 2]
    assert done.unfinished == [3]


def test_feature_method_over_bound_loses_longest_unasked_session() -> None:
    method = _method(max_rows=20)
    for key in (1, 2, 3):
        method.open(key, SessionStart(range(15), GREEDY, 4, 20))
        _send(method, key, 0, 6)
    method.draft([1])
    _send(method, 3, 6, 9)
    assert method.draft([1, 3]).lost == [2]
    _send(method, 1, 6, 14)
    assert method.draft([]).lost == [3]
    for key in (4, 5):  # what was held is free again
        method.open(key, SessionStart(range(15), GREEDY, 4, 20))
    _send(method, 4, 0, 6)
    assert method.draft([]).lost == []


def test_feature_method_over_bound_keeps_sessions_with_few_rows() -> None:
    method = _method(max_rows=20)
    for key in (1, 2, 3):
        method.open(key, SessionStart(range(15), GREEDY, 4, 20))
        _send(method, key, 0, 3)
    _send(method, 2, 3, 12)  # it is not drafted for, and goes on to be sent
    method.draft([1, 3])
    assert method.draft([]).lost == []
    _send(method, 2, 12, 15)
    assert method.draft([]).lost == [2]
    method.open(4, SessionStart(range(15), GREEDY, 4, 20))
    _send(method, 4, 0, 13)
    _send(method, 1, 3, 5)  # whoever brings the rows that are too many
    assert method.draft([]).lost == [4]


def test_feature_session_with_repeated_rows_takes_no_memory() -> None:
    method = _method()
    method.open(1, SessionStart(range(15), GREEDY, 4, 20))
    for end in range(1, 15):
        _send(method, 1, 0, end)
    rows = [method.state(1).rows(i, i + 1) for i in range(14)]
    assert torch.equal(torch.cat(rows), ROWS[:14])
    assert {row.untyped_storage().nbytes() for row in rows} == {WIDTH * 2}


def test_feature_session_when_too_long_keeps_nothing() -> None:
    method = _method(max_rows=20)
    method.open(1, SessionStart(range(18), GREEDY, 4, 40))
    _send(method, 1, 0, 17)
    method.commit(1, 18, [1, 2, 3], 4)  # beyond the longest text
    _send(method, 1, 17, 20)
    method.open(2, SessionStart(range(18), GREEDY, 4, 20))
    _send(method, 2, 0, 17)
    assert method.draft([1, 2]).lost == []
    assert method.state(1).first == method.state(1).end


def test_feature_method_over_max_sessions_loses_newcomers() -> None:
    method = _method(max_sessions=2)
    for key in (1, 2, 3):
        method.open(key, SessionStart(range(5), GREEDY, 4, 20))
        _send(method, key, 0, 5)
    assert method.draft([2, 3]).lost == [3]
    assert method.num_sessions == 2
