"""Find adjacent rows that begin with the same pages."""

from __future__ import annotations

from itertools import takewhile

import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider.engine.shared_prefix import MAX_OWN_PAGES, SharedPrefix

PAGE = 4


def shared(tables: list[list[int]], lengths: list[int]) -> tuple[list[int], list[int]]:
    width = max(map(len, tables))
    padded = torch.tensor([table + [0] * (width - len(table)) for table in tables])
    found = SharedPrefix.of(padded.to(torch.int32), torch.tensor(lengths, dtype=torch.int32), PAGE)
    assert found.places.dtype == found.pages.dtype == torch.int32
    return found.places.tolist(), found.pages.tolist()


def test_shared_prefix_of_adjacent_branches_forms_runs() -> None:
    tables = [[1, 2, 3, 20], [1, 2, 3, 21], [1, 2, 22, 23], [5, 6, 24], [5, 6, 25], [7, 26]]
    lengths = [14, 15, 13, 10, 9, 8]
    assert shared(tables, lengths) == ([0, 1, 2, 0, 1, 0], [0, 3, 2, 0, 2, 0])


def test_shared_prefix_with_many_own_pages_shares_nothing() -> None:
    ends = [list(range(10 * i, 10 * i + MAX_OWN_PAGES)) for i in (1, 2, 3)]
    tables = [[1, *ends[0]], [1, *ends[1], 99], [1, *ends[2]]]
    lengths = [len(table) * PAGE for table in tables]
    assert shared(tables, lengths) == ([0, 0, 0], [0, 0, 0])
    assert shared(tables[::2], lengths[::2]) == ([0, 1], [0, 1])


def test_shared_prefix_of_padding_rows_shares_nothing() -> None:
    assert shared([[9, 9], [9, 9], [9, 9]], [1, 1, 1]) == ([0, 0, 0], [0, 0, 0])


@given(st.lists(st.lists(st.integers(1, 2), min_size=1, max_size=9), min_size=1, max_size=12))
def test_shared_prefix_of_any_tables_forms_maximal_runs(tables: list[list[int]]) -> None:
    """Every row of a run begins with all pages that it is said to share, and has few of its own."""
    tables = [[*table, 10 + i] for i, table in enumerate(tables)]  # each has one of its own
    places, pages = shared(tables, [len(table) * PAGE for table in tables])
    for i, (place, common) in enumerate(zip(places, pages, strict=True)):
        before, here = tables[i - 1], tables[i]
        if place == 0:
            assert common == 0
        else:
            assert place == places[i - 1] + 1
            assert before[:common] == here[:common]
            assert before[common] != here[common]
            assert max(len(before), len(here)) - common <= MAX_OWN_PAGES
    for i in range(1, len(tables)):
        pairs = zip(tables[i - 1], tables[i], strict=False)
        alike = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        few = max(len(tables[i]), len(tables[i - 1])) - alike <= MAX_OWN_PAGES
        assert (places[i] > 0) == (alike > 0 and few)
