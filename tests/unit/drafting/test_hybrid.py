"""Several methods in one proposer: who drafts, what the scorer holds, what a loss does."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from outrider.drafting.copying.deterministic import DeterministicProposer
from outrider.drafting.copying.ngram import NgramProposer
from outrider.drafting.copying.suffix import SuffixProposer
from outrider.drafting.draft_model.proposer import DraftModelProposer
from outrider.drafting.hidden_states.one_shot import OneShotProposer
from outrider.drafting.hybrid import HybridProposer
from outrider.drafting.proposer import NO_PACE, DraftRound, ProposerLimits, SessionStart
from outrider.errors import ConfigError
from outrider.params import Advice, SamplingParams
from tests.support.checkpoints.one_shot_drafts import medusa
from tests.support.models.hash_model import HashModel

GREEDY = SamplingParams(temperature=0.0)
ADVICE = Advice(token_ids=(1, 2, 3, 4, 5, 6, 7, 8), edit=True)


def hybrid(num_pages: int = 64, max_tokens: int = 1000) -> HybridProposer:
    return HybridProposer(
        [
            DeterministicProposer(),
            NgramProposer(max_tokens=max_tokens),
            DraftModelProposer(HashModel(num_pages=num_pages), name="hash"),
        ]
    )


def drafted(round_: DraftRound, session: int) -> tuple[int, list[int]]:
    """Which method drafted, and what."""
    [(key, tree)] = round_.drafts
    assert key == session
    return round_.methods.get(key, 0), list(tree.token_ids)


def test_hybrid_traits_of_several_methods_cover_them_all() -> None:
    traits = hybrid().traits
    assert (traits.method, traits.model, traits.vocab_size) == ("deterministic", "hash", 32)
    assert traits.methods == ("deterministic", "ngram", "draft_model")
    assert traits.max_draft_tokens == 128
    assert traits.runs_ahead


@pytest.mark.parametrize("children", [[], [NgramProposer()], [NgramProposer(), NgramProposer()]])
def test_hybrid_without_different_methods_is_refused(children: list[NgramProposer]) -> None:
    with pytest.raises(ConfigError, match="--method"):
        HybridProposer(children)


@pytest.mark.parametrize(
    ("hints", "prefix", "method"),
    [
        ({}, [9, 1, 2], 2),  # neither advice nor a repetition
        ({}, [1, 2, 3, 1, 2], 1),
        ({"advice": ADVICE}, [1, 2, 3, 1, 2], 0),
        ({"methods": ("draft_model", "ngram")}, [1, 2, 3, 1, 2], 2),
        ({"methods": ("ngram", "suffix", "deterministic"), "advice": ADVICE}, [5, 5, 5], 1),
        ({"methods": ("ngram", "deterministic"), "advice": ADVICE}, [5, 6], 0),
    ],
)
def test_hybrid_with_several_methods_uses_the_first_that_drafts(
    hints: dict[str, Any], prefix: list[int], method: int
) -> None:
    proposer = hybrid()
    proposer.open(1, SessionStart(prefix, GREEDY, 4, 100, **hints))
    who, tokens = drafted(proposer.draft([1]), 1)
    assert who == method
    assert len(tokens) >= 1


def test_hybrid_with_a_method_named_twice_asks_it_once() -> None:
    proposer = hybrid()
    proposer.open(1, SessionStart([1, 2, 3, 1, 2], GREEDY, 4, 100, methods=("ngram", "ngram")))
    assert drafted(proposer.draft([1]), 1) == (1, [3, 1, 2, 3])


def test_hybrid_without_any_draft_sends_an_empty_tree() -> None:
    proposer = hybrid()
    proposer.open(1, SessionStart([1, 2, 3], GREEDY, 4, 100, methods=("deterministic", "ngram")))
    assert drafted(proposer.draft([1]), 1) == (0, [])
    assert proposer.ahead([1], NO_PACE).trees == []


def test_hybrid_methods_that_were_passed_over_follow_commits() -> None:
    proposer = hybrid()
    proposer.open(1, SessionStart([1, 2, 3, 1, 2], GREEDY, 4, 100))
    assert drafted(proposer.draft([1]), 1) == (1, [3, 1, 2, 3])
    proposer.commit(1, 5, [9], 4)  # nothing like it came before
    alone = DraftModelProposer(HashModel(num_pages=64), name="hash")
    alone.open(1, SessionStart([1, 2, 3, 1, 2, 9], GREEDY, 4, 100))
    [(_, tree)] = alone.draft([1]).drafts
    assert drafted(proposer.draft([1]), 1) == (2, list(tree.token_ids))


def test_hybrid_after_replacing_a_draft_sends_it_again() -> None:
    """The n-gram's tree still holds the draft, but the scorer has the advice's by now."""
    proposer = hybrid()
    advice = Advice(token_ids=(3, 1, 8), edit=False)
    start = SessionStart(
        [1, 2, 3, 1, 2], GREEDY, 1, 100, methods=("deterministic", "ngram"), advice=advice
    )
    proposer.open(1, start)
    assert drafted(proposer.draft([1]), 1) == (1, [3])
    [(_, tree)] = proposer.ahead([1], NO_PACE).trees
    assert tree.first_path(3) == (3, 1, 2)
    proposer.commit(1, 5, [3, 1], 1)
    assert drafted(proposer.draft([1]), 1) == (0, [8])
    proposer.commit(1, 7, [2], 1)  # the advice was wrong, the n-gram's tree went on with it
    who, tokens = drafted(proposer.draft([1]), 1)
    assert (who, tokens[0]) == (1, 3)


def test_hybrid_ahead_asks_the_method_that_drafted() -> None:
    proposer = hybrid()
    proposer.open(1, SessionStart([1, 2, 3, 1, 2], GREEDY, 2, 100))
    proposer.draft([1])
    round_ = proposer.ahead([1], NO_PACE)
    assert (len(round_.trees), round_.methods) == (1, {1: 1})
    proposer.commit(1, 5, [3, 1, 2], 2)
    assert proposer.draft([1]).at_hand == [1]


def test_hybrid_after_an_unwanted_round_keeps_its_draft() -> None:
    """Its method keeps it, and says later that it is at hand."""
    proposer = HybridProposer([NgramProposer(), DraftModelProposer(HashModel(), name="hash")])
    proposer.open(1, SessionStart([1, 2, 3], GREEDY, 4, 100, methods=("draft_model",)))
    _, tokens = drafted(proposer.draft([1]), 1)
    proposer.commit(1, 3, tokens[:1], 0)
    assert drafted(proposer.draft([1]), 1)[1] == []
    proposer.commit(1, 4, tokens[1:2], 1)
    assert drafted(proposer.draft([1]), 1) == (1, tokens[2:])


def test_hybrid_session_lost_by_one_method_is_reopened() -> None:
    proposer = hybrid(max_tokens=12)
    proposer.open(1, SessionStart([1, 2, 3, 1, 2], GREEDY, 2, 100))
    start = SessionStart([5, 6, 7, 5, 6, 7, 5, 6], GREEDY, 2, 100)
    proposer.open(2, start)  # ngram has no room for it
    round_ = proposer.draft([2])
    assert round_.lost == []
    assert drafted(round_, 2)[0] == 2
    assert drafted(proposer.draft([1]), 1) == (1, [3, 1])
    proposer.close(1)
    assert drafted(proposer.draft([2]), 2) == (1, [7, 5]), "given to ngram again"


def test_hybrid_method_that_keeps_losing_is_not_reopened() -> None:
    proposer = HybridProposer([NgramProposer(max_tokens=9), SuffixProposer(max_tokens=9)])
    for session in (1, 2):
        proposer.open(session, SessionStart([1, 2, 3, 1, 2], GREEDY, 2, 100))
    lost: set[int] = set()
    for _ in range(40):
        for session in sorted({1, 2} - lost):
            lost.update(proposer.draft([session]).lost)
    assert proposer.num_sessions >= 1
    assert proposer.num_sessions + len(lost) == 2


@pytest.mark.parametrize("seed", range(8))
def test_hybrid_with_any_sessions_answers_each_once(seed: int) -> None:
    """Also where methods lose sessions, to each other's room, while drafts are made."""
    chance = random.Random(seed)
    children = [
        DraftModelProposer(
            HashModel(num_pages=16), name="hash", limits=ProposerLimits(prefill_budget=18)
        ),
        NgramProposer(max_tokens=80),
        SuffixProposer(max_tokens=80),
    ]
    chance.shuffle(children)
    proposer = HybridProposer(children)
    lengths: dict[int, int] = {}
    for session in range(1, 200):
        text = chance.choices(range(4), k=chance.randint(1, 40))
        methods = chance.choice([(), ("ngram", "draft_model"), ("suffix", "ngram")])
        proposer.open(session, SessionStart(text, GREEDY, 4, 60, methods=methods))
        lengths[session] = len(text)
        if len(lengths) > 6:
            ended = chance.choice(list(lengths))
            proposer.close(ended)
            del lengths[ended]
        for known in lengths:
            proposer.commit(known, lengths[known], fresh := chance.choices(range(4), k=2), 4)
            lengths[known] += len(fresh)
        asked = [known for known in lengths if chance.random() < 0.7]
        round_ = proposer.draft(asked)
        lost = [known for known in round_.lost if known in asked]
        drafts = [known for known, _ in round_.drafts]
        assert sorted([*drafts, *round_.at_hand, *round_.unfinished, *lost]) == sorted(asked)
        for known in round_.lost:
            lengths.pop(known, None)
    for known in lengths:
        proposer.close(known)
    assert [child.num_sessions for child in (proposer, *children)] == [0] * 4


@pytest.mark.parametrize(
    ("first", "prompt"), [("ngram", [1, 2, 3, 4, 5]), ("medusa", [1, 2, 3, 1, 2])]
)
def test_hybrid_session_lost_by_hidden_state_method_is_lost(first: str, prompt: list[int]) -> None:
    """Its features must all come again, after another Open: until then nobody would close it."""
    reader = OneShotProposer(medusa(torch.float32, torch.device("cpu")), method="medusa", name="")
    lookup = NgramProposer(max_tokens=12)
    children = [lookup, reader] if first == "ngram" else [reader, lookup]
    proposer = HybridProposer(children)
    proposer.open(1, SessionStart(prompt, GREEDY, 2, 100))
    proposer.open(2, SessionStart([5, 6, 7, 5, 6, 7, 5, 6], GREEDY, 2, 100))  # ngram loses 1
    proposer.draft([2])
    proposer.features(1, 5, b"")
    assert proposer.draft([1]).lost == [1]
    proposer.close(2)
    assert [child.num_sessions for child in (proposer, *children)] == [0] * 3


def test_hybrid_response_of_a_lost_session_is_remembered_once() -> None:
    reader = OneShotProposer(medusa(torch.float32, torch.device("cpu")), method="medusa", name="")
    suffix = SuffixProposer()
    proposer = HybridProposer([suffix, reader])
    text = [1, 2, 3]
    proposer.open(0, SessionStart(text[:2], GREEDY, 2, 100))
    for session in range(3):
        proposer.commit(session, len(text) - 1, text[-1:], 2)
        proposer.features(session, 5, b"")  # a gap: the reader loses it
        assert proposer.draft([session]).lost == [session]
        again = SessionStart(text, GREEDY, 2, 100, num_output_tokens=len(text) - 2)
        proposer.open(session + 1, again)
        text.append(session + 4)
    assert len(suffix.responses) == 0
    proposer.close(3)
    assert len(suffix.responses) == 1


def test_hybrid_at_max_sessions_loses_newcomers() -> None:
    small = [NgramProposer(max_sessions=2), SuffixProposer(max_sessions=2)]
    proposer = HybridProposer(small)
    for session in (1, 2):
        proposer.open(session, SessionStart([1, 2, 1, 2], GREEDY, 4, 100))
    proposer.draft([1])
    proposer.open(3, SessionStart([1, 2, 1, 2], GREEDY, 4, 100))
    assert proposer.draft([1, 2, 3]).lost == [3]
    assert proposer.num_sessions == 2


def test_hybrid_with_a_gap_loses_the_session_once() -> None:
    proposer = hybrid()
    proposer.open(1, SessionStart([1, 2, 3], GREEDY, 4, 100))
    proposer.commit(1, 9, [4], 4)
    assert proposer.draft([1]).lost == [1]
    assert proposer.draft([1]).lost == []
    assert proposer.num_sessions == 0


def test_hybrid_long_prompt_is_unfinished_only_without_another_draft() -> None:
    model = DraftModelProposer(
        HashModel(num_pages=64), name="hash", limits=ProposerLimits(prefill_budget=4)
    )
    proposer = HybridProposer([NgramProposer(), model])
    proposer.open(1, SessionStart(list(range(30)), GREEDY, 2, 100))
    assert proposer.draft([1]).unfinished == [1]
    proposer.close(1)
    proposer.open(2, SessionStart([*range(28), 1, 2], GREEDY, 2, 100))
    round_ = proposer.draft([2])
    assert (round_.unfinished, drafted(round_, 2)) == ([], (0, [3, 4]))


def test_hybrid_with_unknown_sessions_ignores_them() -> None:
    proposer = hybrid()
    proposer.commit(7, 0, [1], 4)
    proposer.close(7)
    assert proposer.draft([7]).drafts == []
