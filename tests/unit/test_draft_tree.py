"""Trees of guesses: built, cut and walked."""

from __future__ import annotations

import random
import timeit

from outrider.draft_tree import DraftTree


def test_branches_hang_where_the_chain_is_left() -> None:
    tree = DraftTree.branched(7, (1, 2, 3), [(3, (4, 5)), (0, (9, 8)), (2, (6,)), (1, ())])
    assert tree.first_path(9) == (1, 2, 3, 4, 5), "the chain first, and what goes on from its end"
    assert tree.walk((9,)) == DraftTree.chain(8, (8,))
    assert tree.walk((1, 2, 6)) == DraftTree(10, (), ())
    assert tree.walk((1, 6)) is None
    assert tree.parents == (-1, 0, 1, 2, 3, -1, 5, 1)
    assert not tree.is_chain
    assert DraftTree.branched(0, (1, 2), [(2, (3,))]).is_chain


def test_its_first_nodes_are_a_tree() -> None:
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


def test_a_walk_is_far_below_a_tenth_of_a_millisecond() -> None:
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
