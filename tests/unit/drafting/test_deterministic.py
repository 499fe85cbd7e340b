"""Copying from advice: the longest match, and the cursor that follows edits."""

from __future__ import annotations

import random
import tracemalloc

import pytest

from outrider.drafting.copying.deterministic import DeterministicProposer, _Edited
from outrider.drafting.copying.edit_cursor import MAX_SEARCHES, EditCursor, Original
from outrider.drafting.proposer import NO_PACE, Follower, SessionStart
from outrider.params import Advice, SamplingParams
from outrider.types import common_prefix_len

GREEDY = SamplingParams(temperature=0.0)
TEXT = tuple(range(100, 200))


def draft(proposer: DeterministicProposer, session: int) -> list[int]:
    [(_, tree)] = proposer.draft([session]).drafts
    return list(tree.token_ids)


def rounds(original: tuple[int, ...], output: tuple[int, ...], wanted: int = 128) -> int:
    """Verifications that `output` takes when the cursor drafts it."""
    cursor = EditCursor(Original(original))
    done = count = 0
    while done < len(output):
        guess = cursor.guess(wanted)
        accepted = common_prefix_len(guess, output[done:])
        cursor.follow(output[done : done + accepted + 1])
        done += accepted + 1
        count += 1
    return count


def edited(*changes: tuple[int, int, tuple[int, ...]]) -> tuple[int, ...]:
    """TEXT with [start, stop) replaced by tokens, from the last change to the first."""
    text = TEXT
    for start, stop, tokens in sorted(changes, reverse=True):
        text = text[:start] + tokens + text[stop:]
    return text


@pytest.mark.parametrize(
    ("change", "most"),
    [
        ((50, 50, ()), 1),  # nothing
        ((50, 51, (1,)), 3),  # one token for another
        ((50, 51, (1, 2, 3)), 6),
        ((50, 60, ()), 4),  # deleted
        ((50, 90, ()), 4),
        ((50, 50, (1, 2, 3, 4)), 7),  # inserted
        ((50, 54, (1, 2)), 5),
        ((0, 5, ()), 4),
        ((0, 0, (1, 2)), 5),
        ((95, 100, ()), 2),
    ],
)
def test_edit_cursor_after_an_edit_recovers_in_few_rounds(
    change: tuple[int, int, tuple[int, ...]], most: int
) -> None:
    assert rounds(TEXT, edited(change)) <= most


def test_edit_cursor_with_several_edits_follows_each() -> None:
    output = edited((10, 11, (1,)), (30, 30, (2, 3)), (50, 55, ()), (80, 82, (4, 5, 6)))
    assert rounds(TEXT, output) <= 2 + 2 + 4 + 3 + 6


def test_edit_cursor_after_a_replacement_expects_it_again() -> None:
    body = [tuple(range(i, i + 9)) for i in range(100, 300, 20)]
    original = tuple(token for part in body for token in (7, 8, *part))
    renamed = tuple(token for part in body for token in (9, *part))  # 7 8 became 9
    assert rounds(original, renamed) <= 5
    cursor = EditCursor(Original(original))
    cursor.follow(renamed[:15])  # the first replacement, and the second
    assert cursor.guess(10)[:8] == list(renamed[15:23])
    # Left as it was once, it is expected no more.
    cursor.follow((*renamed[15:20], 7, 8, *body[2]))
    assert cursor.guess(4) == [7, 8, *body[3][:2]]


def test_edit_cursor_after_an_insertion_expects_it_again() -> None:
    inserted = (1, 2, 3, 4, 5, 6, 7, 8)
    once = edited((20, 20, inserted))
    twice = edited((20, 20, inserted), (60, 60, inserted))
    assert rounds(TEXT, twice) <= rounds(TEXT, once) + 2


def test_edit_cursor_at_a_wrong_place_finds_the_right_one() -> None:
    lure = (1, 2, 3)
    original = (*range(100, 120), *lure, *range(300, 340))
    # "1 2" is written where the original had nothing of the kind, then the original goes on.
    output = (*range(100, 110), 1, 2, *range(110, 120), *lure, *range(300, 340))
    assert rounds(original, output) <= 8


def test_edit_cursor_with_repeated_text_does_not_go_back() -> None:
    block = (1, 2, 3, 4)
    original = (*block, *range(100, 130), *block, *range(200, 230), *block, 7, 8, 9)
    cursor = EditCursor(Original(original))
    cursor.follow((*block, *range(100, 130)))
    cursor.follow((50, 51))  # something new, then what occurs three times
    cursor.follow(block)
    assert cursor.guess(2) == [200, 201]


@pytest.mark.parametrize("seed", range(8))
def test_edit_cursor_after_unrelated_output_drafts_known_tokens(seed: int) -> None:
    rng = random.Random(seed)
    original = tuple(rng.randrange(6) for _ in range(200))
    output = tuple(rng.randrange(6) for _ in range(400))
    cursor = EditCursor(Original(original))
    for token in output:
        guess = cursor.guess(16)
        assert len(guess) <= 16
        assert set(guess) <= set(original) | set(output)
        cursor.follow((token,))


def test_deterministic_without_edit_continues_the_longest_match() -> None:
    proposer = DeterministicProposer()
    advice = Advice(token_ids=(1, 2, 3, 9, 1, 2, 4, 5, 2, 4, 6))
    proposer.open(1, SessionStart([4, 5], GREEDY, 128, 1000, advice=advice))
    assert draft(proposer, 1) == [], "the prompt is not looked up"
    proposer.commit(1, 2, [1, 2], 128)
    assert draft(proposer, 1) == [3, 9, 1, 2, 4, 5, 2, 4, 6]
    proposer.commit(1, 4, [4], 128)
    assert draft(proposer, 1) == [5, 2, 4, 6], "three tokens agree there, two later on"
    proposer.commit(1, 5, [8], 128)
    assert draft(proposer, 1) == []


def test_deterministic_with_edit_begins_with_the_advice() -> None:
    proposer = DeterministicProposer()
    start = SessionStart(list(TEXT), GREEDY, 128, 1000, advice=Advice(token_ids=TEXT, edit=True))
    proposer.open(1, start)
    assert draft(proposer, 1) == list(TEXT)
    proposer.commit(1, 100, [100, 101, 1], 128)
    assert draft(proposer, 1) == list(TEXT[3:11]), "a few tokens, as nothing is certain"
    proposer.commit(1, 103, [103, 104], 128)
    assert draft(proposer, 1) == list(TEXT[5:])


def test_deterministic_when_reopened_continues_the_output() -> None:
    proposer = DeterministicProposer()
    start = SessionStart(
        [5, 6, *TEXT[:30]],
        GREEDY,
        128,
        1000,
        advice=Advice(token_ids=TEXT, edit=True),
        num_output_tokens=30,
    )
    proposer.open(1, start)
    assert draft(proposer, 1) == list(TEXT[30:])


def test_deterministic_when_reopened_catches_up_over_several_rounds() -> None:
    chance = random.Random(3)
    written = [*chance.choices(range(50), k=3 * MAX_SEARCHES), *TEXT[:9]]
    proposer = DeterministicProposer()
    advice = Advice(token_ids=(*chance.choices(range(50), k=400), *TEXT), edit=True)
    start = SessionStart(
        [5, *written], GREEDY, 16, 10_000, advice=advice, num_output_tokens=len(written)
    )
    proposer.open(1, start)
    drafts = []
    for token in TEXT[9:15]:
        drafts.append(draft(proposer, 1))
        proposer.commit(1, 1 + len(written), [token], 16)
        written.append(token)
    assert drafts[0] == []
    assert draft(proposer, 1) == list(TEXT[15:31])


@pytest.mark.parametrize("size", [1, 64])
def test_original_with_any_match_length_keeps_its_memory_small(size: int) -> None:
    text = tuple(range(10_000))
    tracemalloc.start()
    try:
        original = Original(text, size)
        assert tracemalloc.get_traced_memory()[0] < 400 * len(text)
    finally:
        tracemalloc.stop()
    assert original.places(text[:500]) == [499]


def test_deterministic_without_advice_drafts_nothing() -> None:
    proposer = DeterministicProposer()
    proposer.open(1, SessionStart([1, 2, 1, 2], GREEDY, 128, 1000))
    assert draft(proposer, 1) == []


def test_deterministic_ahead_continues_the_advice() -> None:
    proposer = DeterministicProposer()
    proposer.open(1, SessionStart([1], GREEDY, 10, 1000, advice=Advice(token_ids=TEXT, edit=True)))
    assert draft(proposer, 1) == list(TEXT[:10])
    [(_, tree)] = proposer.ahead([1], None).trees  # type: ignore[arg-type]
    assert tree.first_path(21) == TEXT[:21]
    proposer.commit(1, 1, TEXT[:11], 10)
    assert proposer.draft([1]).at_hand == [1]


def test_deterministic_ahead_of_a_long_copy_follows_each_token_few_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    followed: list[int] = []
    follow = EditCursor.follow
    monkeypatch.setattr(
        EditCursor, "follow", lambda self, t: (followed.append(len(t)), follow(self, t))[1]
    )
    text = tuple(range(400))
    proposer = DeterministicProposer()
    proposer.open(1, SessionStart([1], GREEDY, 128, 1000, advice=Advice(token_ids=text, edit=True)))
    proposer.draft([1])
    followed.clear()
    proposer.ahead([1], NO_PACE)
    assert sum(followed) <= 4 * 128


@pytest.mark.parametrize("seed", range(5))
def test_deterministic_alternatives_in_any_order_are_the_same(seed: int) -> None:
    chance = random.Random(seed)
    advice = Advice(tuple(chance.choices(range(6), k=80)), edit=True)
    written = list(advice.token_ids[:20]) + chance.choices(range(6), k=5)

    def source() -> _Edited:
        tokens = [9, *written]
        follower = Follower(SessionStart(tokens, GREEDY, 16, 200), DeterministicProposer().traits)
        return _Edited(follower, advice, 1)

    kept = source()
    for _ in range(40):
        path = tuple(chance.choices([*advice.token_ids[20:24], 7], k=chance.randint(0, 5)))
        assert kept.alternatives(path) == source().alternatives(path)
        assert kept.guess(path, 8) == source().guess(path, 8)
        if chance.random() < 0.2:
            written.extend(path)
            kept.follower.commit(len(kept.follower.tokens), path, 16)
            kept.commit()


def test_deterministic_advice_beyond_the_memory_is_cut() -> None:
    proposer = DeterministicProposer(max_tokens=20)
    start = SessionStart([1] * 5, GREEDY, 128, 1000, advice=Advice(token_ids=TEXT, edit=True))
    proposer.open(1, start)
    assert draft(proposer, 1) == list(TEXT[:14])
