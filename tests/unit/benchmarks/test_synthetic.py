"""Synthetic acceptance: the length that was asked for, and nothing else of a step changed."""

from __future__ import annotations

import pytest

from benchmarks.synthetic import SyntheticRunner, _as_if, chance_per_token
from outrider.config import EngineConfig
from outrider.draft_tree import DraftTree
from outrider.engine.engine import Engine
from outrider.engine.policy.fixed import FixedPolicy
from outrider.engine.runner import Runner
from outrider.params import SamplingParams, StopParams
from outrider.types import Commit, Request
from tests.support.hash_model import HashModel

K = 4
TOKENS = 400
WRONG = 31  # a draft that is right only by chance


def commits_of(mean_length: float | None) -> list[list[Commit]]:
    """Per session its rounds; drafts are always there, and WRONG throughout."""
    model = HashModel(page_size=16, num_pages=400, max_model_len=1000)
    runner = Runner(model)
    engine = Engine(
        model,
        EngineConfig(page_size=16, num_pages=400, max_model_len=1000, num_speculative_tokens=K),
        policy=FixedPolicy(K, max_wait_s=0.0),  # the adaptive one follows the clock
        runner=runner if mean_length is None else SyntheticRunner(runner, mean_length, K),
    )
    for session in (1, 2, 3):
        engine.submit(
            Request(
                session_id=session,
                prompt_token_ids=(session, 7, 9),
                sampling=SamplingParams(temperature=0.0),
                stop=StopParams(max_tokens=TOKENS),
            )
        )
        engine.set_drafting(session, "proposer", K)
    rounds: dict[int, list[Commit]] = {1: [], 2: [], 3: []}
    live = set(rounds)
    while live:
        events = engine.step()
        engine.check_invariants()
        if events is None:
            continue
        for commit in events.commits:
            rounds[commit.session_id].append(commit)
            if commit.finish_reason is not None:
                live.discard(commit.session_id)
                continue
            length = commit.base_len + len(commit.token_ids)
            block = DraftTree.chain(length, (WRONG,) * K)
            engine.post_block(commit.session_id, block, "proposer", 0)
    return list(rounds.values())


def test_rounds_have_the_mean_length_and_hold_the_drafted_tokens() -> None:
    sessions = commits_of(3.0)
    # The first round has no draft yet, the last ones a short one.
    full = [c for rounds in sessions for c in rounds[1:] if c.base_len + K < TOKENS]
    lengths = [len(c.token_ids) for c in full]
    assert sum(lengths) / len(lengths) == pytest.approx(3.0, abs=0.35)
    assert set(lengths) == {1, 2, 3, 4, 5}
    assert all(c.token_ids[:-1] == (WRONG,) * (len(c.token_ids) - 1) for c in full)
    assert all(sum(len(c.token_ids) for c in rounds) == TOKENS for rounds in sessions)


def test_where_a_draft_is_rejected_the_text_leaves_it() -> None:
    drafted = (3, 5, 8, 0)
    told = [(3, 5), (3, 5, 9), (4, 4, 8), (1, 1, 1, 0), (1, 1, 1, 1, 7)]
    for accepted, chosen in enumerate(told):
        choices = _as_if(drafted, accepted, chosen)
        assert choices[:accepted] == drafted[:accepted]
        assert accepted == K or choices[accepted] != drafted[accepted]
    assert _as_if((), 0, (7,)) == (7,)


def test_it_repeats_itself_and_sessions_differ() -> None:
    first, again = commits_of(2.5), commits_of(2.5)
    lengths = [[len(c.token_ids) for c in rounds] for rounds in first]
    assert lengths == [[len(c.token_ids) for c in rounds] for rounds in again]
    assert lengths[0] != lengths[1] != lengths[2]


def test_length_one_accepts_nothing_and_keeps_what_the_target_says() -> None:
    rounds = commits_of(1.0)
    assert all(len(c.token_ids) == 1 for commits in rounds for c in commits)
    texts = [[t for c in commits for t in c.token_ids] for commits in rounds]
    targets = [[t for c in commits for t in c.token_ids] for commits in commits_of(None)]
    for text, target in zip(texts, targets, strict=True):
        # The draft of one token: as long as the target says another one, that stands.
        agreed = target.index(WRONG)
        assert agreed > 0
        assert text[:agreed] == target[:agreed]
        assert text[agreed] == WRONG - 1


def test_the_chance_gives_the_length() -> None:
    chance = chance_per_token(3.0, 4)
    assert 1 + chance + chance**2 + chance**3 + chance**4 == pytest.approx(3.0)
    assert chance_per_token(5.0, 4) == pytest.approx(1.0)
    with pytest.raises(ValueError, match="1 to 5"):
        chance_per_token(5.1, 4)
