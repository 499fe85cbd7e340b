"""Plain tokens of a step on their way into a stream's next message."""

from __future__ import annotations

from outrider.types import Grown
from scorer_service.token_columns import TokenColumns


def grown(*session_ids: int) -> Grown:
    """Return a token for each session: ten times its id."""
    count = len(session_ids)
    return Grown(session_ids, (3,) * count, tuple(10 * s for s in session_ids), (0,) * count)


def joined(*session_ids: int) -> tuple[TokenColumns, list[str]]:
    woken: list[str] = []
    columns = TokenColumns(lambda: woken.append("woken"))
    for session_id in session_ids:
        columns.join(session_id, 100 + session_id)
    return columns, woken


def test_columns_with_all_rows_joined_leave_none() -> None:
    columns, woken = joined(1, 2)
    assert columns.add(grown(2, 1)) == Grown()
    assert columns.take() == ([102, 101], [20, 10])
    assert columns.take() == ([], [])
    assert woken == ["woken"]


def test_columns_with_some_rows_joined_return_the_others() -> None:
    columns, woken = joined(1, 3)
    columns.leave(3)
    columns.leave(4)
    assert columns.add(grown(1, 2, 3)) == grown(2, 3)
    assert columns.take() == ([101], [10])
    assert columns.add(grown(2)) == grown(2)
    assert woken == ["woken"]


def test_columns_with_a_message_due_take_no_second_token() -> None:
    columns, woken = joined(1, 2)
    columns.add(grown(1))
    assert columns.add(grown(1, 2)) == grown(1)
    assert columns.take() == ([101, 102], [10, 20])
    assert columns.add(grown(1, 2)) == Grown()
    assert woken == ["woken"] * 2


def test_columns_drop_the_token_of_a_row() -> None:
    columns, _ = joined(1, 2, 3)
    columns.add(grown(1, 2, 3))
    columns.drop(102)
    columns.drop(104)
    assert columns.take() == ([101, 103], [10, 30])
