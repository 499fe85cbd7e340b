"""Follows an edited copy of a text through the original.

Speculative edit (Cursor and Fireworks, 2024; RTP-LLM's `sp_edit`): the output is a known text with
changes. So its next tokens are that text's next tokens, once the place is found again after each
change.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from copy import copy

from outrider.params import TokenIds

_NEAREST = 64  # places that are looked at after a change
_FIRM = 4  # tokens that must agree with a place before it is believed
_DRIFT = 16  # tokens of drift that outweigh one token of agreement
_MAX_DRIFT = 64
_MAX_PENDING = 32  # tokens that are compared with a place
_SHORT = 4  # tokens: changes of up to so many are taken to keep the length
_MAX_EDIT, _MAX_EDITS = 8, 64  # tokens of a replacement that may recur, and their number
_MAX_INSERTIONS = 16
MAX_SEARCHES = 256  # at once; no round takes as many
_NO_EVIDENCE, _ONE_TOKEN = 8, 16  # draft tokens where nothing, or one token, speaks for a place


class Original:
    """The text that is edited, and the places where each n-gram of `size` tokens ends.

    N-grams are kept by their hash, for memory: a collision costs a guess.
    """

    def __init__(self, token_ids: TokenIds, size: int = 1) -> None:
        self.token_ids = token_ids
        self._size = size
        self._places: dict[int, list[int]] = {}
        for end in range(size, len(token_ids) + 1):
            self._places.setdefault(hash(token_ids[end - size : end]), []).append(end - 1)

    def places(self, tokens: Sequence[int], start: int = 0) -> list[int]:
        """Return the first `_NEAREST` places from `start` on of the n-gram that ends `tokens`."""
        places = self._places.get(hash(tuple(tokens[-self._size :])), [])
        first = bisect_left(places, start)
        return places[first : first + _NEAREST]

    def agreement(self, tokens: Sequence[int], place: int) -> int:
        """Return how many of the last `tokens` are those that end at `place`."""
        most = min(len(tokens), place + 1)
        own = self.token_ids
        return next((n for n in range(most) if own[place - n] != tokens[-1 - n]), most)


class EditCursor:
    """The place of the output's next token in the original.

    As long as the output follows the original, so does the cursor. Where the output leaves it, the
    output's last tokens are looked for from that place on (`_search`). A place that was found is
    believed when `_FIRM` tokens agree; until then the search begins again from the last place that
    was believed. So the cursor never goes back behind a place that proved right.

    A replacement that was seen is expected wherever the original has the replaced tokens, until
    they are once left as they were. An insertion that was seen is expected when another one begins
    in the same way.
    """

    def __init__(self, original: Original, min_match: int = 2) -> None:
        self._original = original
        self._min_match = min_match
        self._at = 0
        self._limit: int | None = None  # draft tokens, while the place is not found
        self._left_at = 0  # where the output left the original
        self._pending: list[int] = []  # the output since then; empty: the place is believed
        self._agreed = 0  # tokens that agree with a place that is not believed yet
        self._edits: dict[int, dict[TokenIds, TokenIds]] = {}  # first -> removed -> inserted
        self._insertions: tuple[TokenIds, ...] = ()  # the last one first
        self._verbatim = 0  # tokens in a row that were copied unchanged
        self._expected: TokenIds = ()  # of a known replacement that has begun

    def clone(self) -> EditCursor:
        """Return a copy that can follow a guess."""
        other = copy(self)
        other._pending = list(self._pending)
        other._edits = {first: dict(edits) for first, edits in self._edits.items()}
        return other

    def follow(self, tokens: Sequence[int]) -> int:
        """Follow the output; return how many of `tokens` were followed.

        These are all of them, unless they take more than `MAX_SEARCHES` searches.
        """
        searches = 0
        for count, token in enumerate(tokens):
            if searches == MAX_SEARCHES:
                return count
            followed = self._advance(token)
            if followed and not self._pending:
                continue
            if not self._pending:
                self._left_at = self._at
            self._pending.append(token)
            if followed and self._limit is None:
                self._agreed += 1
            else:
                self._search()
                searches += 1
            if self._limit is None and self._agreed >= _FIRM:
                self._pending.clear()
        return len(tokens)

    def guess(self, wanted: int) -> list[int]:
        """Return the next tokens; few, or none, where the place is not certain."""
        limit = wanted if self._limit is None else min(wanted, self._limit)
        own, at, guess = self._original.token_ids, self._at, list(self._expected)
        while len(guess) < limit and at < len(own):
            edit = self._edit_at(at) if self._edits else None
            if edit is not None:
                guess += edit[1]
                at += len(edit[0])
            else:
                stop = at + 1 if self._edits else at + limit
                guess += own[at:stop]
                at = stop
        return guess[:limit]

    @property
    def agreed(self) -> int:
        """The output's last tokens that speak for the place; at least 1."""
        return max(1, self._agreed, self._verbatim)

    @property
    def unchanged(self) -> TokenIds:
        """The token that comes next if the original does; empty at its end."""
        return self._original.token_ids[self._at : self._at + 1]

    def _advance(self, token: int) -> bool:
        """Return whether `token` comes next here, as it was or as it was replaced before."""
        if self._expected:
            followed = self._expected[0] == token
            self._expected = self._expected[1:] if followed else ()
            return followed
        if self.unchanged == (token,):
            self._at += 1
            self._verbatim += 1
            self._unlearn()
            return True
        self._verbatim = 0
        edit = self._edit_at(self._at)
        if edit is None or edit[1][0] != token:
            return False
        self._at += len(edit[0])
        self._expected = edit[1][1:]
        return True

    def _search(self) -> None:
        """Look for the place that the output's last tokens come from.

        A place is the better the more tokens agree, and the less it drifts: as much of the original
        should have passed as was written instead.
        """
        del self._pending[:-_MAX_PENDING]
        pending, left_at = self._pending, self._left_at
        best, best_score, best_agreed = -1, (False, 0.0), 0
        # An insertion may end as the text before it did: hence the place before.
        for place in self._original.places(pending, max(0, left_at - 1)):
            agreed = self._original.agreement(pending, place)
            drift = abs(place + 1 - left_at - len(pending))
            enough = agreed >= self._min_match or (drift == 0 and len(pending) <= _SHORT)
            score = (enough, agreed - min(drift, _MAX_DRIFT) / _DRIFT)
            if best < 0 or score > best_score:
                best, best_score, best_agreed = place, score, agreed
        self._agreed = best_agreed
        if best_score[0]:
            self._at, self._limit = best + 1, None
            self._learn(
                self._original.token_ids[left_at : best + 1 - best_agreed],
                tuple(pending[: len(pending) - best_agreed]),
            )
        elif known := self._insertion(pending):
            self._at, self._limit, self._expected = left_at, None, known[len(pending) :]
            self._agreed = len(pending) - 1
        elif best >= 0 and best - left_at <= _MAX_DRIFT:
            self._at, self._limit = best + 1, _ONE_TOKEN
        else:
            self._at = min(left_at + len(pending), len(self._original.token_ids))
            self._limit = _NO_EVIDENCE if len(pending) <= _SHORT else 0

    def _learn(self, removed: TokenIds, inserted: TokenIds) -> None:
        """Expect a short replacement to recur, and an insertion that begins as this one did."""
        if not removed and 1 < len(inserted) < _MAX_PENDING:
            self._insertions = (inserted, *self._insertions[: _MAX_INSERTIONS - 1])
        if 0 < len(removed) <= _MAX_EDIT and 0 < len(inserted) <= _MAX_EDIT:
            if sum(map(len, self._edits.values())) >= _MAX_EDITS:
                self._edits.clear()
            self._edits.setdefault(removed[0], {})[removed] = inserted

    def _insertion(self, tokens: Sequence[int]) -> TokenIds:
        """Return the last known insertion that begins with `tokens` and goes on, or nothing."""
        begun = tuple(tokens)
        return next((i for i in self._insertions if i[: len(begun)] == begun != i), ())

    def _unlearn(self) -> None:
        """Forget a replacement of tokens that were just copied unchanged."""
        if not self._edits:
            return
        own, at = self._original.token_ids, self._at
        for size in range(1, min(self._verbatim, _MAX_EDIT) + 1):
            edits = self._edits.get(own[at - size])
            if edits is not None:
                edits.pop(own[at - size : at], ())

    def _edit_at(self, at: int) -> tuple[TokenIds, TokenIds] | None:
        """Return the longest known replacement of the original's tokens at `at`."""
        own = self._original.token_ids
        edits = self._edits.get(own[at]) if at < len(own) else None
        if not edits:
            return None
        fitting = [edit for edit in edits.items() if own[at : at + len(edit[0])] == edit[0]]
        return max(fitting, key=lambda edit: len(edit[0]), default=None)
