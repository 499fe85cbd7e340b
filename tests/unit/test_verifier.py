"""Verification by enumeration of small vocabularies."""

from __future__ import annotations

from itertools import product

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.draft_tree import chain_parents
from outrider.engine.rounds import token_kinds
from outrider.engine.tree_mask import depths
from outrider.engine.verifier import verify, verify_rows, verify_tree, verify_trees
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


def _paths(parents: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The path to every node, and the empty one."""
    paths: list[tuple[int, ...]] = [()]
    for node, parent in enumerate(parents):
        paths.append((*paths[parent + 1], node))
    return paths


def test_the_longest_path_of_a_tree_that_the_target_chooses_is_accepted() -> None:
    """By all trees of up to three nodes over two tokens, and all choices."""
    for size in range(4):
        for parents in product(*(range(-1, i) for i in range(size))):
            for drafts in product(range(2), repeat=size):
                for choices in product(range(3), repeat=size + 1):
                    right = [
                        path
                        for path in _paths(parents)
                        if all(drafts[n] == choices[parents[n] + 1] for n in path)
                    ]
                    accepted = verify_tree(drafts, parents, choices)
                    assert accepted in right
                    # Of siblings with the same token the first counts, whatever is below them.
                    if len(set(zip(parents, drafts, strict=True))) == size:
                        assert accepted == max(right, key=len)


def test_a_chain_is_a_tree() -> None:
    for size in range(4):
        for drafts in product(range(2), repeat=size):
            for choices in product(range(2), repeat=size + 1):
                path = verify_tree(drafts, chain_parents(size), choices)
                assert len(path) == verify(drafts, choices)


trees = st.lists(
    st.integers(0, 9).flatmap(
        lambda size: st.tuples(
            st.lists(tokens, min_size=size, max_size=size),
            st.tuples(*(st.integers(-1, i - 1) for i in range(size))),
            st.lists(tokens, min_size=size + 1, max_size=size + 1),
        )
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=1000, deadline=None, derandomize=True)
@given(rows=trees)
def test_the_fast_walk_equals_the_readable_one(
    rows: list[tuple[list[int], tuple[int, ...], list[int]]],
) -> None:
    width = max(len(drafts) for drafts, _, _ in rows)
    depth = max(max(depths(parents), default=-1) for _, parents, _ in rows) + 1
    if depth == 0:
        return
    padded = torch.tensor([(drafts + [-1] * width)[:width] for drafts, _, _ in rows])
    parents = torch.tensor([([*each] + [-1] * width)[:width] for _, each, _ in rows])
    choices = torch.tensor([(chosen + [0] * width)[: width + 1] for _, _, chosen in rows])
    walked = verify_trees(padded, parents, choices, depth).tolist()
    for path, row in zip(walked, rows, strict=True):
        expected = verify_tree(*row)
        assert path == [*expected, *[-1] * (depth - len(expected))]


def test_kinds() -> None:
    accepted, plain = TokenKind.ACCEPTED, TokenKind.PLAIN
    assert token_kinds(0, 0, 1) == (plain,)
    assert token_kinds(2, 2, 3) == (accepted, accepted, TokenKind.BONUS)
    assert token_kinds(2, 1, 2) == (accepted, TokenKind.RECOVERED)
    assert token_kinds(2, 2, 1) == (accepted,), "trimmed by a stop"
    assert token_kinds(2, 2, 0) == ()
