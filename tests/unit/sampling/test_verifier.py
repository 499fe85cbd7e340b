"""Verification by enumeration of small vocabularies."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from itertools import product

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from outrider.draft_tree import chain_parents, depths
from outrider.engine.batch import RowSlice
from outrider.engine.sampling.verify import verify_rows, verify_trees
from outrider.engine.sequence import Sequence
from outrider.engine.step import ScheduledRow
from outrider.engine.tree_walk import path_order, walk_trees
from outrider.policy.row import Drafting, Offered
from outrider.rounds import token_kinds
from outrider.types import Request, TokenKind
from tests.support.models.verification import verify, verify_tree


def test_verify_of_any_draft_accepts_the_longest_common_prefix() -> None:
    for length in range(4):
        for draft in product(range(3), repeat=length):
            for choices in product(range(3), repeat=length + 1):
                accepted = verify(draft, choices)
                assert draft[:accepted] == choices[:accepted]
                assert accepted == length or draft[accepted] != choices[accepted]


def test_verify_rows_of_all_short_rows_equals_verify_of_each() -> None:
    rows = [
        (draft, choices)
        for length in range(5)
        for draft in product(range(3), repeat=length)
        for choices in product(range(3), repeat=length + 1)
    ]
    _check_rows(rows)


tokens = st.integers(0, 2)
long_rows = st.lists(
    st.lists(tokens, min_size=5, max_size=8).flatmap(
        lambda draft: st.tuples(
            st.just(draft), st.lists(tokens, min_size=len(draft) + 1, max_size=len(draft) + 1)
        )
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(rows=long_rows)
def test_verify_rows_of_any_rows_equals_verify_of_each(
    rows: list[tuple[list[int], list[int]]],
) -> None:
    _check_rows(rows)


def _check_rows(rows: Rows[tuple[Rows[int], Rows[int]]]) -> None:
    width = max(len(choices) for _, choices in rows)
    drafts = torch.tensor([([*draft] + [-1] * width)[: width - 1] for draft, _ in rows])
    choices = torch.tensor([([*chosen] + [0] * width)[:width] for _, chosen in rows])
    fast = verify_rows(drafts.view(len(rows), width - 1).long(), choices)
    assert fast.tolist() == [verify(draft, chosen) for draft, chosen in rows]


def _paths(parents: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The path to every node, and the empty one."""
    paths: list[tuple[int, ...]] = [()]
    for node, parent in enumerate(parents):
        paths.append((*paths[parent + 1], node))
    return paths


def test_verify_tree_of_any_tree_accepts_the_chosen_path() -> None:
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


def test_verify_tree_of_a_chain_equals_verify() -> None:
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


def test_verify_trees_of_all_small_trees_equals_verify_tree_of_each() -> None:
    rows = [
        (drafts, parents, choices)
        for size in range(4)
        for parents in product(*(range(-1, i) for i in range(size)))
        for drafts in product(range(2), repeat=size)
        for choices in product(range(3), repeat=size + 1)
    ]
    _check_trees(rows)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(rows=trees)
def test_verify_trees_of_any_trees_equals_verify_tree_of_each(
    rows: list[tuple[list[int], tuple[int, ...], list[int]]],
) -> None:
    _check_trees(rows)


def _check_trees(rows: Rows[tuple[Rows[int], tuple[int, ...], Rows[int]]]) -> None:
    width = max(len(drafts) for drafts, _, _ in rows)
    depth = max(max(depths(parents), default=-1) for _, parents, _ in rows) + 1
    if depth == 0:
        return
    padded = torch.tensor([([*drafts] + [-1] * width)[:width] for drafts, _, _ in rows])
    parents = torch.tensor([([*each] + [-1] * width)[:width] for _, each, _ in rows])
    choices = torch.tensor([([*chosen] + [0] * width)[: width + 1] for _, _, chosen in rows])
    walked = verify_trees(padded, parents, choices, depth).tolist()
    for path, row in zip(walked, rows, strict=True):
        expected = verify_tree(*row)
        assert path == [*expected, *[-1] * (depth - len(expected))]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    rows=trees,
    committed=st.lists(st.integers(1, 9), min_size=6, max_size=6),
    pages=st.randoms(use_true_random=False).map(lambda rng: rng.sample(range(36), 36)),
)
def test_walk_trees_with_accepted_nodes_moves_them_to_the_text(
    rows: list[tuple[list[int], tuple[int, ...], list[int]]],
    committed: list[int],
    pages: list[int],
) -> None:
    """Chains, trees and rows without drafts in one step, in pages of four slots."""
    assume(any(drafts for drafts, _, _ in rows))
    page_size, step, places = 4, [], []
    for i, (drafts, parents, _) in enumerate(rows):
        request = Request(i, tuple(range(committed[i])))
        options = {"max_len": 99, "stop_ids": frozenset[int](), "submitted_at": 0.0}
        seq = Sequence(request, drafting=Drafting(Offered(9)), **options)
        table, start = pages[6 * i : 6 * i + 6], committed[i] - 1  # its last token lacks KV
        tree = () if parents == chain_parents(len(parents)) else parents
        row = RowSlice((start, *drafts), start, table, 1 + len(drafts), tree)
        step.append(ScheduledRow(seq, row, tuple(drafts)))
        places.append([page * page_size + offset for page in table for offset in range(page_size)])
    drawn = torch.tensor([token for _, _, choices in rows for token in choices])
    walked = walk_trees(drawn, step, page_size)
    held = torch.arange(len(pages) * page_size)
    held[walked.target] = held[walked.source]
    counts = [len(choices) for _, _, choices in rows]
    order = path_order(walked.at, counts).tolist()
    first = 0
    for row, slots, length, said, count in zip(
        rows, places, committed[: len(rows)], walked.tokens.tolist(), counts, strict=True
    ):
        path = verify_tree(*row)
        along = [0, *(node + 1 for node in path)]
        assert said[: len(path) + 2] == [len(path), *(row[2][at] for at in along)]
        assert order[first : first + len(along)] == [first + at for at in along]
        assert all(first <= at < first + count for at in order[first : first + count])
        text = slots[:length] + [slots[length + node] for node in path]
        assert held[slots[: len(text)]].tolist() == text
        assert held[slots[length + len(row[0]) :]].tolist() == slots[length + len(row[0]) :]
        first += count


def test_token_kinds_of_any_round_follow_from_its_counts() -> None:
    accepted, plain = TokenKind.ACCEPTED, TokenKind.PLAIN
    assert token_kinds(0, 0, 1) == (plain,)
    assert token_kinds(2, 2, 3) == (accepted, accepted, TokenKind.BONUS)
    assert token_kinds(2, 1, 2) == (accepted, TokenKind.RECOVERED)
    assert token_kinds(2, 2, 1) == (accepted,), "trimmed by a stop"
    assert token_kinds(2, 2, 0) == ()
