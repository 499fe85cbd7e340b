"""Trees of guesses: built, cut and walked."""

from __future__ import annotations

import math
import random
import timeit

import pytest

from outrider.draft_tree import MAX_DRAFT_PROBS, DraftProbs, DraftTree
from outrider.errors import InvalidRequestError


def test_draft_tree_branched_adds_branches_where_the_chain_is_left() -> None:
    tree = DraftTree.branched(7, (1, 2, 3), [(3, (4, 5)), (0, (9, 8)), (2, (6,)), (1, ())])
    assert tree.first_path(9) == (1, 2, 3, 4, 5), "the chain first, and what goes on from its end"
    assert tree.walk((9,)) == DraftTree.chain(8, (8,))
    assert tree.walk((1, 2, 6)) == DraftTree(10, (), ())
    assert tree.walk((1, 6)) is None
    assert tree.parents == (-1, 0, 1, 2, 3, -1, 5, 1)
    assert not tree.is_chain
    assert DraftTree.branched(0, (1, 2), [(2, (3,))]).is_chain


def test_draft_tree_at_most_any_number_is_a_tree() -> None:
    rng = random.Random(3)
    tokens = [rng.randrange(50) for _ in range(40)]
    parents = [rng.randrange(-1, i) for i in range(40)]
    tree = DraftTree.validated(0, tokens, parents, vocab_size=50, max_nodes=40)
    for n in (0, 1, 17, 39, 40, 99):
        cut = tree.at_most(n)
        kept = min(n, 40)
        assert cut == DraftTree.validated(
            0, tokens[:kept], parents[:kept], vocab_size=50, max_nodes=40
        )


def test_draft_tree_below_a_node_prunes_in_order() -> None:
    #  0 - 1 - 3
    #    \ 2 - 4 - 6
    #          \ 5
    tree = DraftTree(7, tuple(range(10, 17)), (-1, 0, 0, 1, 2, 2, 4))
    assert tree.below(-1, 9, 9) == tree
    assert tree.below(-1, 3, 9) == tree.at_most(3)
    assert tree.below(0, 9, 9) == DraftTree(7, (11, 12, 13, 14, 15, 16), (-1, -1, 0, 1, 1, 3))
    assert tree.below(0, 4, 1) == DraftTree(7, (11, 12), (-1, -1))
    assert tree.below(-1, 4, 3) == DraftTree(7, (10, 11, 12, 13), (-1, 0, 0, 1))
    assert tree.below(2, 9, 1) == DraftTree(7, (14, 15), (-1, -1))
    assert tree.below(6, 9, 9) == DraftTree(7, (), ())
    gapped = DraftTree(0, (1, 2, 3, 4), (-1, 0, 1, -1))
    assert gapped.below(-1, 3, 2) == DraftTree(0, (1, 2, 4), (-1, 0, -1)), "the next one instead"


def test_draft_tree_below_any_node_equals_the_definition() -> None:
    rng = random.Random(5)
    for _ in range(30):
        size = rng.randrange(1, 12)
        parents = tuple(rng.randrange(-1, i) for i in range(size))
        tree = DraftTree(7, tuple(range(size)), parents, (None,) * size)
        lines: list[list[int]] = [[-1]]  # of the root and every node: who is above it, and itself
        for node, parent in enumerate(parents):
            lines.append([*lines[parent + 1], node])
        for node, line in enumerate(lines, start=-1):
            most, deepest = rng.randrange(1, 9), rng.randrange(1, 5)
            descendants = [i for i in range(size) if node in lines[i + 1][:-1]]
            near = [i for i in descendants if len(lines[i + 1]) - len(line) <= deepest][:most]

            def part(base_len: int, kept: list[int], tree: DraftTree = tree) -> DraftTree:
                above = tuple(kept.index(p) if (p := tree.parents[i]) in kept else -1 for i in kept)
                return DraftTree(base_len, tuple(kept), above, (None,) * len(kept))

            assert tree.below(node, most, deepest) == part(7, near)
            assert tree.walk(line[1:]) == part(7 + len(line) - 1, descendants)
            assert tree.is_leaf(node) == (not descendants)


@pytest.mark.parametrize(
    ("token_ids", "parents", "param"),
    [
        ((1, 2, 3, 4), (), "token_ids"),
        ((1, 10), (), "token_ids"),
        ((1, 2), (-1,), "parents"),
        ((1, 2), (-1, 0, 1), "parents"),
        ((1, 2), (-1, 1), "parents"),
        ((1, 2), (0, 0), "parents"),
        ((1, 2), (-1, -2), "parents"),
    ],
    ids=str,
)
def test_draft_tree_validated_without_a_tree_refuses(
    token_ids: tuple[int, ...], parents: tuple[int, ...], param: str
) -> None:
    whole = DraftTree.validated(0, (1, 9, 3), (-1, 0, -1), vocab_size=10, max_nodes=3)
    assert whole == DraftTree(0, (1, 9, 3), (-1, 0, -1))
    with pytest.raises(InvalidRequestError) as caught:
        DraftTree.validated(0, token_ids, parents, vocab_size=10, max_nodes=3)
    assert caught.value.param == param


def test_draft_tree_walks_and_paths_equal_the_definition() -> None:
    rng = random.Random(7)
    for i in range(400):
        size = rng.randrange(1, 30)
        chain = range(-1, size - 1)
        parents = tuple(chain if i % 2 else [rng.randrange(-1, j) for j in range(size)])
        tree = DraftTree(0, tuple(rng.randrange(3) for _ in range(size)), parents)
        node = start = rng.randrange(-1, size)
        preferred: list[int] = []
        while node in parents:
            node = parents.index(node)
            preferred.append(tree.token_ids[node])
        for most in (1, 3, 4, 9, 30):
            assert tree.first_path(most, start) == tuple(preferred[:most])
        wrong = [3] * rng.randrange(2)
        tokens, reached = preferred[: rng.randrange(len(preferred) + 1)] + wrong, start
        for token in tokens[: len(tokens) - len(wrong)]:
            below = [j for j, parent in enumerate(parents) if parent == reached]
            reached = next(j for j in below if tree.token_ids[j] == token)
        assert tree.descend(tokens, start) == (None if wrong else reached)


def test_draft_tree_walk_of_large_tree_is_fast() -> None:
    chain = tuple(range(1000, 1008))
    branches = [(a, tuple(range(a * 100, a * 100 + 6))) for a in range(9)]
    tree = DraftTree.branched(0, chain, branches)
    assert len(tree.token_ids) == 62
    last = (*chain, 800, 801)  # along the whole chain, into the last branch

    def walk() -> None:
        node = tree.descend(last)
        assert node is not None
        assert not tree.is_leaf(node)

    assert min(timeit.repeat(walk, number=100, repeat=20)) / 100 < 50e-6


def test_draft_tree_with_probs_keeps_them_with_their_nodes() -> None:
    probs = [DraftProbs((t, t + 1), (0.75, 0.25)) for t in range(6)]
    # 0 -> 1 -> 2, and 3 -> 4 beside it; 5 goes on after 2.
    tree = DraftTree.validated(
        7, range(6), (-1, 0, 1, -1, 3, 2), vocab_size=10, max_nodes=6, probs=probs
    )
    assert tree.first_path(9) == (0, 1, 2, 5)
    assert tree.first_probs(9) == tuple(probs[i] for i in (0, 1, 2, 5))
    assert tree.first_probs(1, 1) == (probs[2],)
    assert tree.at_most(4).probs == tuple(probs[:4])
    walked = tree.walk((0,))
    assert walked is not None
    assert (walked.token_ids, walked.probs) == ((1, 2, 5), (probs[1], probs[2], probs[5]))
    assert DraftTree.chain(7, (1, 2)).first_probs(9) == ()
    masses = [DraftProbs((), ()), probs[1]]
    assert DraftTree.validated(0, (4, 1), (), vocab_size=10, max_nodes=2, probs=masses).first_probs(
        9
    ) == (None, probs[1]), "a node of its own may be a point mass"


MALFORMED = {
    "one too few": [],
    "one too many": [DraftProbs((5,), (1.0,))] * 3,
    "lengths differ": [DraftProbs((5, 6), (1.0,))] * 2,
    "no tokens": [DraftProbs((), (1.0,))] * 2,
    "not a number": [DraftProbs((5, 6), (0.5, math.nan))] * 2,
    "infinite": [DraftProbs((5, 6), (0.5, math.inf))] * 2,
    "below zero": [DraftProbs((5, 6, 7), (0.7, 0.5, -0.2))] * 2,
    "sum": [DraftProbs((5, 6), (0.5, 0.4))] * 2,
    "twice the same token": [DraftProbs((5, 5), (0.5, 0.5))] * 2,
    "outside the vocabulary": [DraftProbs((5, 10), (0.5, 0.5))] * 2,
    "its own token missing": [DraftProbs((6, 7), (0.5, 0.5))] * 2,
    "its own token impossible": [DraftProbs((5, 7), (0.0, 1.0))] * 2,
    "too many tokens": [
        DraftProbs(tuple(range(MAX_DRAFT_PROBS + 1)), (1 / (MAX_DRAFT_PROBS + 1),) * 257)
    ]
    * 2,
}


@pytest.mark.parametrize("probs", MALFORMED.values(), ids=MALFORMED)
def test_draft_tree_validated_without_a_distribution_refuses(probs: list[DraftProbs]) -> None:
    good = DraftProbs((5, 6), (0.5, 0.5))
    vocab_size = 10_000 if len(probs) == 2 and len(probs[0].token_ids) > 10 else 10
    for parents in ((), (-1, -1)):
        parts = {"vocab_size": vocab_size, "max_nodes": 2}
        DraftTree.validated(0, (5, 5), parents, **parts, probs=[good, good])
        with pytest.raises(InvalidRequestError) as caught:
            DraftTree.validated(0, (5, 5), parents, **parts, probs=probs or [good])
        assert caught.value.param == "draft_probs"


def test_draft_tree_is_outrun_behind_a_leaf() -> None:
    tree = DraftTree(5, (1, 2, 3, 4), (-1, 0, 0, 1))  # 1 2 4, and 1 3
    for tokens in ((1, 2, 4, 9), (1, 3, 9), (1, 3, 9, 9)):
        assert tree.is_outrun(tokens)
    for tokens in ((), (1,), (1, 3), (1, 2, 9), (9,), (1, 9, 9, 9)):
        assert not tree.is_outrun(tokens)
    assert DraftTree.chain(5, ()).is_outrun((1,))


def test_tree_of_another_number_of_confidences_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="one confidence per token"):
        DraftTree.validated(0, (1, 2), (), 10, 4, confidences=b"\x01")


def test_confidences_follow_the_walk_of_a_tree() -> None:
    tree = DraftTree.branched(3, (5, 6), [(1, (7, 8))], bytes((1, 2, 3, 4)))
    assert tree.first_confidences(4) == bytes((1, 2))
    rest = tree.walk((5, 7))
    assert rest is not None
    assert (rest.token_ids, rest.confidences) == ((8,), bytes((4,)))
    assert DraftTree.chain(3, (5, 6), (), bytes((1, 2))).walk((5,)) == DraftTree.chain(
        4, (6,), (), bytes((2,))
    )
