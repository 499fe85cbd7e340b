"""The suffix index against a definition by brute force; what is remembered, for whom, how long."""

from __future__ import annotations

import random
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.drafting.copying import suffix
from outrider.drafting.copying.suffix import Responses, SuffixIndex, SuffixProposer
from outrider.drafting.copying.suffix_kernels import END
from outrider.drafting.copying.suffix_settings import SuffixSettings
from outrider.drafting.proposer import SessionStart
from outrider.drafting.sessions import IDLE_S
from outrider.errors import ConfigError
from outrider.params import SamplingParams
from tests.support.simulators.methods import Clock

GREEDY = SamplingParams(temperature=0.0)
SMALL_TEXT = st.lists(st.integers(0, 2), max_size=40)


def definition(
    texts: list[list[int]], context: list[int], wanted: int, factor: float, min_prob: float
) -> tuple[float, list[int]]:
    """SuffixDecoding over all places; of equally frequent tokens the later place's."""
    best: tuple[float, list[int]] = (0.0, [])
    for size in range(len(context), 0, -1):
        ends = [
            text[place:]
            for text in reversed(texts)
            for place in range(len(text) - 1, size - 1, -1)
            if text[place - size : place] == context[-size:]
        ]
        score, prob, tokens = 0.0, 1.0, []
        while len(tokens) < min(wanted, int(size * factor + 1e-6)):
            following = [end[len(tokens)] for end in ends if len(end) > len(tokens)]
            if not following:
                break
            token = max(following, key=following.count)
            prob *= following.count(token) / len(ends)
            if prob < min_prob:
                break
            ends = [end for end in ends if end[len(tokens) : len(tokens) + 1] == [token]]
            score += prob
            tokens.append(token)
        if score > best[0] + 1e-9:
            best = score, tokens
    return best


@given(
    texts=st.lists(SMALL_TEXT, min_size=1, max_size=3),
    context=st.lists(st.integers(0, 2), max_size=12),
    wanted=st.integers(1, 8),
    factor=st.sampled_from((0.5, 1.0, 3.0)),
    min_prob=st.sampled_from((0.0, 0.1, 0.6)),
    dropped=st.integers(0, 2),
)
def test_suffix_index_of_any_text_drafts_as_the_definition(
    texts: list[list[int]],
    context: list[int],
    wanted: int,
    factor: float,
    min_prob: float,
    dropped: int,
) -> None:
    index = SuffixIndex()
    for text in texts:
        index.append([*text, END])
    kept = texts[dropped:]
    index.drop(sum(len(text) + 1 for text in texts[:dropped]))
    score, tokens = definition(kept, context, wanted, factor, min_prob)
    found = index.draft(
        np.array(context, np.int32),
        wanted,
        SuffixSettings(max_spec_factor=factor, min_token_prob=min_prob),
    )
    assert found.copied.token_ids == tokens
    assert found.score == pytest.approx(score)


def test_suffix_index_that_grows_and_shrinks_finds_the_same() -> None:
    index = SuffixIndex()
    for i in range(400):
        index.append([i, i + 1, i + 2, END])
        if i >= 10:
            index.drop(4)
    context = np.array([399, 400], np.int32)
    assert index.draft(context, 4, SuffixSettings()).copied.token_ids == [401]
    assert index.next_tokens(context, 3) == [401]
    gone = np.array([380, 381], np.int32)
    assert index.draft(gone, 4, SuffixSettings()).copied.token_ids == []
    assert len(index) == 40


@pytest.mark.parametrize("seed", range(4))
def test_suffix_index_anywhere_in_its_room_equals_the_definition(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it goes round its room, gets more and less of it, and comes to the last place."""
    monkeypatch.setattr(suffix, "_SMALLEST", 8)
    monkeypatch.setattr(suffix, "_MAX_PLACE", 500)
    chance = random.Random(seed)
    index, texts = SuffixIndex(), list[list[int]]()
    for i in range(400):
        most = 5 if i // 20 % 2 else 1
        while len(texts) >= most:
            index.drop(len(texts.pop(0)) + 1)
        texts.append(chance.choices(range(3), k=chance.randrange(12)))
        index.append([*texts[-1], END])
        context = chance.choices(range(3), k=chance.randrange(1, 10))
        score, tokens = definition(texts, context, 6, 1.0, 0.1)
        found = index.draft(np.array(context, np.int32), 6, SuffixSettings())
        assert found.copied.token_ids == tokens
        assert found.score == pytest.approx(score)


def test_suffix_index_of_constant_size_moves_nothing() -> None:
    index = SuffixIndex(range(1000))
    links = index._text.links
    for _ in range(200):
        index.drop(40)
        index.append(range(40))
    assert index._text.links is links


def test_suffix_index_of_any_size_takes_at_most_four_times_its_tokens() -> None:
    index = SuffixIndex()
    for added, dropped in ((200, 0), (5000, 200), (10, 4900), (0, 100), (3, 3), (20_000, 19_990)):
        index.append(range(added))
        index.drop(dropped)
        assert len(index._text.tokens) <= max(256, 4 * len(index))


def draft(proposer: SuffixProposer, session: int) -> list[int]:
    [(_, tree)] = proposer.draft([session]).drafts
    return list(tree.token_ids)


def answered(proposer: SuffixProposer, session: int, tokens: list[int], tenant: str = "") -> None:
    """A request to which the answer was `tokens`."""
    proposer.open(session, SessionStart([90, 91], GREEDY, 8, 100, tenant=tenant))
    proposer.commit(session, 2, tokens, 8)
    proposer.close(session)


def test_suffix_draft_after_a_short_match_is_as_long_as_it() -> None:
    proposer = SuffixProposer()
    proposer.open(1, SessionStart([1, 2, 3, 4, 5, 6, 7, 8, 2, 3, 4], GREEDY, 8, 100))
    assert draft(proposer, 1) == [5, 6, 7]


def test_suffix_copy_of_its_own_text_continues_a_period() -> None:
    proposer = SuffixProposer()
    proposer.open(1, SessionStart([5, 6, 5, 6, 5, 6], GREEDY, 8, 100))
    assert draft(proposer, 1) == [5, 6, 5, 6]


def test_suffix_after_lost_sessions_remembers_only_responses() -> None:
    clock = Clock()
    proposer = SuffixProposer(max_sessions=1, clock=clock)
    answered(proposer, 1, [1, 2, 3, 4, 5])
    proposer.open(2, SessionStart([90, 91], GREEDY, 8, 100))
    proposer.commit(2, 2, [6, 7, 8, 9], 8)
    clock.now = IDLE_S
    proposer.open(3, SessionStart([2, 3], GREEDY, 8, 100))  # 2 is lost
    assert draft(proposer, 3) == [4, 5]
    assert len(proposer.responses) == 1
    proposer.close(3)
    assert len(proposer.responses) == 1, "nothing was generated"


def test_suffix_resumed_request_is_remembered_from_its_first_output() -> None:
    proposer = SuffixProposer()
    proposer.open(1, SessionStart([1] * 20 + [2, 3], GREEDY, 8, 100, num_output_tokens=2))
    proposer.commit(1, 22, [4], 8)
    proposer.close(1)
    assert proposer.responses.num_tokens == 8 + 3 + 1  # some of the prompt, the output, an end


def test_suffix_with_two_tenants_shares_responses_only_if_set() -> None:
    for shared in (False, True):
        proposer = SuffixProposer(SuffixSettings(shared_across_tenants=shared))
        answered(proposer, 1, [1, 2, 3, 4, 5], tenant="a")
        proposer.open(2, SessionStart([2, 3], GREEDY, 8, 100, tenant="b"))
        assert draft(proposer, 2) == ([4, 5] if shared else [])
        proposer.open(3, SessionStart([2, 3], GREEDY, 8, 100, tenant="a"))
        assert draft(proposer, 3) == [4, 5]


def test_suffix_responses_when_full_forget_the_oldest() -> None:
    responses = Responses(SuffixSettings(max_cached_requests=2, max_cached_tokens=20))
    responses.add("a", [1] * 3)
    responses.add("b", [2] * 3)
    responses.add("a", [3] * 3)
    assert len(responses) == 2
    assert len(responses.of("a") or ()) == 4  # with its end
    responses.add("c", [4] * 15)
    assert (len(responses), responses.num_tokens) == (2, 20)
    assert responses.of("b") is None
    responses.add("c", [5] * 20)
    assert responses.num_tokens == 20, "too long to be remembered at all"


def test_suffix_tenant_with_all_memory_gives_it_back() -> None:
    responses = Responses(SuffixSettings(max_cached_tokens=20_000))
    tenants = "abcdefghij"
    tracemalloc.start()
    try:
        for tenant in tenants:
            for _ in range(20):
                responses.add(tenant, range(989))
            for other in tenants:  # a trickle keeps each tenant's index alive
                responses.add(other, [1, 2, 3])
        assert responses.of("a") is not None
        assert tracemalloc.get_traced_memory()[0] < 150 * responses.num_tokens
    finally:
        tracemalloc.stop()


def test_suffix_memory_is_bounded_in_tokens() -> None:
    clock = Clock()
    proposer = SuffixProposer(max_tokens=10, clock=clock)
    proposer.open(1, SessionStart([1] * 6, GREEDY, 4, 100))
    proposer.open(2, SessionStart([1] * 4, GREEDY, 4, 100))
    proposer.open(3, SessionStart([1] * 4, GREEDY, 4, 100))
    assert proposer.draft([1, 2]).lost == [3]
    clock.now = IDLE_S
    proposer.draft([2])
    proposer.commit(2, 4, [1], 4)
    assert proposer.draft([]).lost == [1]


def test_suffix_session_with_impossible_tokens_drafts_nothing() -> None:
    proposer = SuffixProposer()
    proposer.open(1, SessionStart([2**32 - 1, 1, 1], GREEDY, 4, 100))
    proposer.commit(1, 3, [1], 4)
    assert draft(proposer, 1) == []
    proposer.close(1)
    assert len(proposer.responses) == 0


@pytest.mark.parametrize(
    "settings",
    [
        {"max_tree_depth": 0},
        {"max_spec_factor": 0.0},
        {"min_token_prob": 1.5},
        {"max_cached_requests": -1},
        {"max_cached_tokens": -1},
    ],
)
def test_suffix_with_bad_settings_is_refused(settings: dict[str, float]) -> None:
    (name,) = settings
    with pytest.raises(ConfigError, match=f"^--suffix-decoding-{name.replace('_', '-')} must"):
        SuffixSettings(**settings)  # type: ignore[arg-type]
