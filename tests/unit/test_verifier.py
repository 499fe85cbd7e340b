"""Verification by enumeration of small vocabularies."""

from __future__ import annotations

from itertools import product

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.engine.sequence import token_kinds
from outrider.engine.verifier import verify, verify_rows
from outrider.types import TokenKind


def test_the_longest_common_prefix_is_accepted() -> None:
    for length in range(4):
        for draft in product(range(3), repeat=length):
            for choices in product(range(3), repeat=length + 1):
                accepted = verify(draft, choices)
                assert draft[:accepted] == choices[:accepted]
                assert accepted == length or draft[accepted] != choices[accepted]


tokens = st.integers(0, 2)
rows = st.lists(
    st.lists(tokens, max_size=8).flatmap(
        lambda draft: st.tuples(
            st.just(draft), st.lists(tokens, min_size=len(draft) + 1, max_size=len(draft) + 1)
        )
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=1000, deadline=None, derandomize=True)
@given(rows=rows)
def test_the_fast_one_equals_the_readable_one(rows: list[tuple[list[int], list[int]]]) -> None:
    width = max(len(choices) for _, choices in rows)
    drafts = torch.tensor([(draft + [-1] * width)[: width - 1] for draft, _ in rows])
    choices = torch.tensor([(chosen + [0] * width)[:width] for _, chosen in rows])
    fast = verify_rows(drafts.view(len(rows), width - 1).long(), choices)
    assert fast.tolist() == [verify(draft, chosen) for draft, chosen in rows]


def test_kinds() -> None:
    accepted, plain = TokenKind.ACCEPTED, TokenKind.PLAIN
    assert token_kinds(0, 0, 1) == (plain,)
    assert token_kinds(2, 2, 3) == (accepted, accepted, TokenKind.BONUS)
    assert token_kinds(2, 1, 2) == (accepted, TokenKind.RECOVERED)
    assert token_kinds(2, 2, 1) == (accepted,), "trimmed by a stop"
    assert token_kinds(2, 2, 0) == ()
