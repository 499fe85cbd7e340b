"""Plain tokens of a stream's requests, a step at a time, since most requests have no more."""

from __future__ import annotations

from collections.abc import Callable

from outrider.types import Grown


class TokenColumns:
    """Rows that have one plain token in the next message of a stream. Used on the event loop.

    A row has joined while nothing of it is to be written before its next token.
    """

    __slots__ = ("_row_ids", "_wake", "ids", "token_ids")

    def __init__(self, wake: Callable[[], object]) -> None:
        """Call `wake` where a message is due."""
        self._wake = wake
        self._row_ids: dict[int, int] = {}  # of those that have joined, by session
        self.ids: list[int] = []
        self.token_ids: list[int] = []

    def join(self, session_id: int, row_id: int) -> None:
        self._row_ids[session_id] = row_id

    def leave(self, session_id: int) -> None:
        self._row_ids.pop(session_id, None)

    def add(self, grown: Grown) -> Grown:
        """Take the tokens of rows that have joined, and return the others."""
        ids = [*map(self._row_ids.get, grown.session_ids)]
        if self.ids:  # a message has a row once
            taken = frozenset(self.ids)
            ids = [None if row_id in taken else row_id for row_id in ids]
        mine, others = grown, Grown()
        if None in ids:
            joined = [row_id is not None for row_id in ids]
            mine, others = grown.where(joined), grown.where([not each for each in joined])
        if mine.session_ids and not self.ids:
            self._wake()
        self.ids += [row_id for row_id in ids if row_id is not None]
        self.token_ids += mine.token_ids
        return others

    def take(self) -> tuple[list[int], list[int]]:
        """Return rows and tokens for a message, and begin with the next one."""
        taken = self.ids, self.token_ids
        self.ids, self.token_ids = [], []
        return taken

    def drop(self, row_id: int) -> None:
        """Forget a row's token, if it is there."""
        if row_id in self.ids:
            place = self.ids.index(row_id)
            del self.ids[place], self.token_ids[place]
