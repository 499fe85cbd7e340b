"""The device takes from a table each row's draft for how its step ended."""

from __future__ import annotations

from itertools import chain

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider.draft_tree import DraftTree
from outrider.vllm.ahead.branch_table import BranchTable, as_outcomes

CPU = torch.device("cpu")


@st.composite
def trees(draw: st.DrawFn) -> DraftTree:
    parents = draw(st.lists(st.integers(-1, 30), max_size=24))
    tree = [min(parent, i - 1) for i, parent in enumerate(parents)]
    taken: set[tuple[int, int]] = set()
    tokens = []
    for parent in tree:  # siblings differ
        token = draw(st.integers(0, 3))
        while (parent, token) in taken:
            token += 1
        taken.add((parent, token))
        tokens.append(token)
    return DraftTree(0, tuple(tokens), tuple(tree))


@given(trees(), st.integers(0, 6), st.integers(-1, 23))
def test_outcomes_are_all_ends_of_a_step_that_the_tree_goes_on_after(
    tree: DraftTree, num_verified: int, node: int
) -> None:
    if node >= len(tree.parents):
        return
    verified = tree.first_path(num_verified, node)
    expected = set()
    for accepted in range(len(verified) + 1):
        for token in set(tree.token_ids):
            if accepted < len(verified) and token == verified[accepted]:
                continue  # then more is accepted
            if (end := tree.descend((*verified[:accepted], token), node)) is not None:
                expected.add((accepted + 1, end))
    found = tree.outcomes(num_verified, node)
    assert set(found) == expected
    assert len(found) == len(expected)


@given(
    st.lists(
        st.dictionaries(
            st.tuples(st.integers(1, 3), st.integers(0, 3)),
            st.lists(st.integers(0, 9), min_size=1, max_size=3),
        ),
        min_size=1,
        max_size=4,
    ),
    st.data(),
)
def test_table_gives_each_row_the_draft_of_its_outcome(
    branches: list[dict[tuple[int, int], list[int]]], data: st.DataObject
) -> None:
    k, num_rows = 3, len(branches)
    table = BranchTable(8, k, CPU)
    table.clear(4)  # what the last step left does not matter
    for row in range(4):
        table.write(row, 1, 1, [7] * k)
    table.clear(num_rows)
    for row, drafts in enumerate(branches):
        for (emitted, last), draft in drafts.items():
            table.write(row, emitted, last, [5])  # and longer, as more of it comes
            table.write(row, emitted, last, draft)
    ended = data.draw(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 3)), min_size=num_rows))
    sources = data.draw(st.permutations(range(len(ended))))[:num_rows]
    room = data.draw(st.lists(st.integers(0, k), min_size=num_rows, max_size=num_rows))
    counts, latest = (torch.tensor(each, dtype=torch.int32) for each in zip(*ended, strict=True))
    given = table.choose(as_outcomes(counts, latest), sources, room).tolist()
    drafts = [each.get(ended[source], []) for each, source in zip(branches, sources, strict=True)]
    padded = [draft + [-1] * (k - len(draft)) for draft in drafts]
    assert given == [*chain(*[draft[:n] for draft, n in zip(padded, room, strict=True)])]


def test_table_keeps_the_first_outcomes_of_a_row_with_too_many() -> None:
    table = BranchTable(1, 1, CPU)
    table.clear(1)
    for last in range(50):
        table.write(0, 1, last, [last])
    chosen = []
    for last in (31, 32):
        outcome = as_outcomes(torch.tensor([1]), torch.tensor([last]))
        chosen.append(table.choose(outcome, [0], [1]).tolist())
    assert chosen == [[31], [-1]]


@pytest.mark.parametrize("k", [4, 14, 15, 30])
def test_device_takes_tokens_of_no_memory_that_was_never_written(
    k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *given, **how: empty(*given, **how).fill_(2**30))
    table = BranchTable(1, k, CPU)
    table.clear(1)
    # A copy of several lines may have the first of them, with the outcome, from after the write.
    before = table._on_host.clone()
    table.write(0, 1, 7, [5] * k)
    table._on_host[:, :, 16:] = before[:, :, 16:]
    chosen = table.choose(as_outcomes(torch.tensor([1]), torch.tensor([7])), [0], [k])
    assert set(chosen.tolist()) <= {5, -1}
