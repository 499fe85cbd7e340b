"""Prompt lookup against a brute-force definition, and the bookkeeping of committed tokens."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.draft_tree import DraftTree
from outrider.drafting.building.config import NgramConfig
from outrider.drafting.copying.ngram import NgramProposer
from outrider.drafting.proposer import NO_PACE, DraftRound, SessionStart
from outrider.drafting.sessions import IDLE_S
from outrider.errors import ConfigError
from outrider.params import Advice, SamplingParams
from tests.support.simulators.methods import Clock

GREEDY = SamplingParams(temperature=0.0)


def reference(tokens: list[int], sizes: range, wanted: int) -> list[int]:
    """The most recent earlier match of the longest suffix n-gram, copied on."""
    for size in sizes:
        for start in range(len(tokens) - size - 1, -1, -1):
            if tokens[start : start + size] == tokens[len(tokens) - size :]:
                text = list(tokens)
                for i in range(wanted):
                    text.append(text[start + size + i])
                return text[len(tokens) :]
    return []


def draft(proposer: NgramProposer, session: int) -> tuple[int, list[int]]:
    [(key, tree)] = proposer.draft([session]).drafts
    assert key == session
    assert tree.parents == tuple(range(-1, len(tree.token_ids) - 1))
    return tree.base_len, list(tree.token_ids)


@given(
    prefix=st.lists(st.integers(0, 3), min_size=1, max_size=30),
    commits=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=6), max_size=8),
    sizes=st.tuples(st.integers(1, 4), st.integers(0, 3)),
    wanted=st.integers(1, 6),
    overlap=st.integers(0, 5),
)
def test_ngram_drafts_of_any_text_equal_the_definition(
    prefix: list[int],
    commits: list[list[int]],
    sizes: tuple[int, int],
    wanted: int,
    overlap: int,
) -> None:
    smallest, largest = sizes[0], sizes[0] + sizes[1]
    proposer = NgramProposer(prompt_lookup_min=smallest, prompt_lookup_max=largest)
    proposer.open(1, SessionStart(prefix, GREEDY, wanted, 1000))
    text = list(prefix)
    for tokens in commits:
        expected = reference(text, range(largest, smallest - 1, -1), wanted)
        assert draft(proposer, 1) == (len(text), expected)
        base_len = max(0, len(text) - overlap)  # repeats some of what is known
        proposer.commit(1, base_len, text[base_len:] + tokens, wanted)
        proposer.commit(1, len(text), tokens, wanted)  # the same again
        text += tokens


def test_ngram_with_a_long_text_reads_it_in_parts() -> None:
    document = tuple(range(100, 5100))
    proposer = NgramProposer()
    proposer.open(1, SessionStart([5, 6, 7, 5, 6], GREEDY, 2, 100))
    advice = Advice(references=(document,))
    proposer.open(2, SessionStart([*document, 100, 101], GREEDY, 3, 20_000, advice=advice))
    first, second = proposer.draft([2, 1]), proposer.draft([2, 1])  # 4096 of the 10,003 each
    assert first.unfinished == second.unfinished == [2]
    assert [(key, tree.token_ids) for key, tree in first.drafts] == [(1, (7, 5))]
    assert second.at_hand == [1]
    assert not proposer.ahead([2], NO_PACE).trees
    assert draft(proposer, 2) == (5002, [102, 103, 104])


def test_ngram_with_many_newcomers_delays_drafts_little() -> None:
    proposer = NgramProposer(max_sessions=40)
    proposer.open(99, SessionStart([5, 6, 7, 5, 6], GREEDY, 2, 100))
    for key in range(32):
        proposer.open(key, SessionStart(list(range(3000)), GREEDY, 2, 5000))
    rounds = 1
    while unfinished := (done := proposer.draft([*range(32), 99])).unfinished:
        if rounds == 1:
            assert [key for key, _ in done.drafts] == [0, 99]
            assert unfinished == [*range(1, 32)]
        rounds += 1
    assert rounds <= 32 * 3000 / 4096 + 1


def test_ngram_overlapping_copy_continues_a_period() -> None:
    proposer = NgramProposer()
    proposer.open(1, SessionStart([5, 6, 5, 6, 5, 6], GREEDY, 7, 100))
    assert draft(proposer, 1) == (6, [5, 6, 5, 6, 5, 6, 5])


def test_ngram_without_match_drafts_an_empty_tree() -> None:
    proposer = NgramProposer()
    proposer.open(1, SessionStart([1, 2, 3], GREEDY, 4, 100))
    assert draft(proposer, 1) == (3, [])


def test_ngram_near_max_len_stops_at_the_end() -> None:
    proposer = NgramProposer()
    proposer.open(1, SessionStart([1, 1, 1, 1, 1], GREEDY, 4, 8))
    assert draft(proposer, 1) == (5, [1, 1])  # the third token comes with the verification
    proposer.commit(1, 5, [1, 1], 4)
    assert draft(proposer, 1) == (7, [])


@pytest.mark.parametrize("base_len", [4, 2**32 - 1])
def test_ngram_with_a_gap_loses_the_session(base_len: int) -> None:
    proposer = NgramProposer()
    proposer.open(1, SessionStart([1, 2, 3], GREEDY, 4, 100))
    proposer.commit(1, base_len, [4], 4)
    done = proposer.draft([1])
    assert (done.lost, done.drafts) == ([1], [])
    assert proposer.num_sessions == 0
    assert proposer.draft([1]).lost == []  # said once


def test_ngram_with_contradicting_tokens_loses_the_session() -> None:
    proposer = NgramProposer()
    proposer.open(1, SessionStart([1, 2, 3], GREEDY, 4, 100))
    proposer.commit(1, 1, [9, 3, 4], 4)
    assert proposer.draft([1]).lost == [1]


def test_ngram_without_room_loses_newcomers() -> None:
    clock = Clock()
    proposer = NgramProposer(max_sessions=2, clock=clock)
    for session in (1, 2):
        proposer.open(session, SessionStart([1, 2], GREEDY, 4, 100))
    for session in (3, 4, 5):
        clock.now += IDLE_S / 2
        proposer.open(session, SessionStart([1, 2], GREEDY, 4, 100))
        round_ = proposer.draft([1, 2, session])
        assert round_.lost == [session]
        assert [key for key, _ in round_.drafts] == [1, 2]
    proposer.close(1)
    proposer.open(6, SessionStart([1, 2], GREEDY, 4, 100))
    assert proposer.draft([2, 6]).lost == []
    assert proposer.num_sessions == 2


def test_ngram_without_room_evicts_the_least_recently_drafted_idle_session() -> None:
    clock = Clock()
    proposer = NgramProposer(max_sessions=3, clock=clock)
    for session in (1, 2, 3):
        proposer.open(session, SessionStart([1, 2], GREEDY, 4, 100))
    clock.now = 1.0
    proposer.draft([1])
    clock.now = IDLE_S
    proposer.open(4, SessionStart([1, 2], GREEDY, 0, 100))
    assert proposer.draft([]).lost == [4], "it wants no drafts"
    for session in (5, 6, 7):
        proposer.open(session, SessionStart([1, 2], GREEDY, 4, 100))
    assert proposer.draft([]).lost == [2, 3, 7]
    clock.now = IDLE_S + 1.0
    proposer.open(8, SessionStart([1, 2], GREEDY, 4, 100))
    assert proposer.draft([]).lost == [1]


def test_ngram_memory_is_bounded_in_tokens() -> None:
    clock = Clock()
    proposer = NgramProposer(max_tokens=10, clock=clock)
    proposer.open(1, SessionStart([1] * 6, GREEDY, 4, 100))
    proposer.open(2, SessionStart([1] * 4, GREEDY, 4, 100))
    proposer.open(3, SessionStart([1] * 4, GREEDY, 4, 100))
    assert proposer.draft([1, 2]).lost == [3]
    clock.now = IDLE_S
    proposer.draft([2])
    proposer.commit(2, 4, [1], 4)
    assert proposer.draft([]).lost == [1]


def test_ngram_session_beyond_max_len_drafts_nothing() -> None:
    proposer = NgramProposer(max_model_len=6)
    proposer.open(1, SessionStart([1] * 5, GREEDY, 4, 100))
    proposer.commit(1, 5, [1, 1], 4)
    done = proposer.draft([1])
    assert done.lost == []
    nothing = DraftTree.chain(7, ())  # after all that is committed: the scorer need not wait
    assert done.drafts == [(1, nothing)]
    proposer.commit(1, 2**32 - 1, [1, 1], 4)  # a gap loses nothing: the text is not followed
    assert proposer.draft([1]) == DraftRound(drafts=[(1, nothing)])
    proposer.commit(1, 6, [1, 1, 1], 4)
    proposer.commit(1, 7, [1], 4)  # a repeat
    assert proposer.draft([1]) == DraftRound(drafts=[(1, DraftTree.chain(9, ()))])


def test_ngram_session_without_drafts_takes_no_memory() -> None:
    """It counts for nothing, so there may be as many as sessions are."""
    proposer = NgramProposer(max_model_len=5000)
    advice = Advice(references=(tuple(range(4000)),))
    start = SessionStart(list(range(5000)), GREEDY, 4, 10_000, advice=advice)
    tracemalloc.start()
    held, _ = tracemalloc.get_traced_memory()
    proposer.open(1, start)
    proposer.draft([1])
    full, _ = tracemalloc.get_traced_memory()
    proposer.commit(1, 5000, [1], 4)
    silent, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert full - held > 1_000_000
    assert silent - held < 300_000


def test_ngram_with_unknown_sessions_ignores_them() -> None:
    proposer = NgramProposer()
    proposer.commit(7, 0, [1], 4)
    proposer.close(7)
    assert proposer.draft([7]).drafts == []


def test_ngram_of_several_matches_copies_the_latest() -> None:
    proposer = NgramProposer()
    text = [1, 2, 5, 10, 1, 2, 5, 11, 1, 2, 6, 12, 1, 2]
    proposer.open(1, SessionStart(text, GREEDY, 2, 100))
    assert draft(proposer, 1) == (14, [6, 12])


def test_ngram_with_references_copies_up_to_their_ends() -> None:
    references = ((1, 2, 3, 4), (5, 6, 7))
    proposer = NgramProposer()
    proposer.open(1, SessionStart([8, 1, 2], GREEDY, 4, 100, advice=Advice(references=references)))
    assert draft(proposer, 1) == (3, [3, 4])
    proposer.commit(1, 3, [9, 5, 6], 4)
    assert draft(proposer, 1) == (6, [7])
    proposer.commit(1, 6, [4, 5], 4)
    assert draft(proposer, 1) == (8, [])
    proposer.commit(1, 8, [1, 2], 4)
    assert draft(proposer, 1) == (10, [9, 5, 6, 4]), "the text is more recent than a reference"


def test_ngram_references_count_as_memory() -> None:
    proposer = NgramProposer(max_tokens=10)
    start = SessionStart(
        [1, 2], GREEDY, 4, 100, advice=Advice(references=((1, 2, 3), (1, 2, 3, 4, 5, 6, 7)))
    )
    proposer.open(1, start)
    assert draft(proposer, 1) == (2, [3]), "the second reference did not fit"
    proposer.open(2, SessionStart([1] * 5, GREEDY, 4, 100))
    assert proposer.draft([]).lost == [2]


def test_ngram_with_bad_limits_is_refused() -> None:
    with pytest.raises(ConfigError, match="--prompt-lookup-min"):
        NgramConfig(prompt_lookup_min=3, prompt_lookup_max=2)
