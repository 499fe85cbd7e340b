"""Prompt lookup: copies the tokens that followed the last time that the text ended the same way.

Saxena, "Prompt Lookup Decoding" (2023), which PaddleNLP calls inference with reference. It needs
no model and pays where output repeats input: edits, summaries, code. Documents besides the prompt
(`Advice.references`) are looked up like it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Unpack

from outrider.drafting.confidence import confidences_of_match
from outrider.drafting.copying.base import NOTHING, Copied, CopyingProposer, Limits, Source
from outrider.drafting.proposer import Follower, SessionStart
from outrider.params import TokenIds

_END = -1  # of a reference; no token
_COMPARED = 64  # tokens before a match: beyond, more say little


class NgramProposer(CopyingProposer):
    """Copies the continuation of a match of the longest n-gram that ends the text.

    N-grams of `prompt_lookup_min` to `prompt_lookup_max` tokens are tried. Of several matches the
    most recent is taken.
    """

    def __init__(
        self,
        *,
        prompt_lookup_min: int = 2,
        prompt_lookup_max: int = 4,
        max_draft_tokens: int = 16,
        **limits: Unpack[Limits],
    ) -> None:
        super().__init__("ngram", max_draft_tokens=max_draft_tokens, **limits)
        self._sizes = range(prompt_lookup_max, prompt_lookup_min - 1, -1)

    def _source(self, follower: Follower, start: SessionStart) -> _Lookup:
        room = self._max_tokens - len(follower.tokens)
        references: list[int] = []
        for reference in start.advice.references:
            if len(references) + len(reference) < room:  # what does not fit is left out
                references += (*reference, _END)
        return _Lookup(follower, references, self._sizes)


class _Lookup(Source):
    """An index from n-gram to the position after its occurrence, in references and then the text.

    Keys are hashes of the n-gram, checked when used: a collision costs a guess, not memory for
    tuples. An n-gram is entered when its next token is known, so a lookup never finds itself.
    """

    def __init__(self, follower: Follower, references: list[int], sizes: range) -> None:
        super().__init__(follower)
        self._references = references
        self._sizes = sizes  # longest first
        self._index: dict[int, int] = {}
        self._read = 0  # tokens, of references and then the text, before which all is entered

    @property
    def num_tokens(self) -> int:
        return len(self._references) + len(self.follower.tokens)

    def commit(self) -> None:
        # The index catches up when it is used; that of a text that grew too long never is again.
        if self.follower.silent:
            self._references = []
            self._read = 0
            self._index.clear()

    def read(self, most: int) -> int:
        start, split = self._read, len(self._references)
        self._read = min(start + most, self.num_tokens)
        self._enter(self._references, range(start, min(self._read, split)), 0)
        self._enter(self.follower.tokens, range(max(start - split, 0), self._read - split), split)
        return self._read - start

    def guess(self, path: TokenIds, wanted: int) -> Copied:
        """Return `wanted` tokens, fewer at the end of a reference, none without a match."""
        found = next(self._matches(path), None)
        if found is None:
            return NOTHING
        if found < len(self._references):
            copied = self._references[found : found + wanted]
            copied = copied[: copied.index(_END)] if _END in copied else copied
        else:  # the copy may run into its own output: text of period p goes on with period p
            period = self.num_tokens + len(path) - found
            copied = [self._token(found + i % period, path) for i in range(wanted)]
        return Copied(copied, confidences_of_match(self._length(found, path), len(copied)))

    def _length(self, found: int, path: TokenIds) -> int:
        """Return how many tokens before `found` agree with the end of the text and `path`."""
        end, most = self.num_tokens + len(path), min(found, _COMPARED)
        for length in range(self._sizes[-1], most):
            if self._token(found - 1 - length, path) != self._token(end - 1 - length, path):
                return length
        return most

    def alternatives(self, path: TokenIds) -> list[int]:
        """Return the tokens that followed matches of the text's end, the longest match first."""
        return list(dict.fromkeys([self._token(found, path) for found in self._matches(path)]))

    def _token(self, position: int, path: TokenIds) -> int:
        for part in (self._references, self.follower.tokens):
            if position < len(part):
                return part[position]
            position -= len(part)
        return path[position]

    def _matches(self, path: TokenIds) -> Iterator[int]:
        """Yield positions after an earlier occurrence of the end of the text and `path`."""
        tokens = self.follower.tokens
        longest = self._sizes[0]
        end = [*tokens[-longest:], *path][-longest:]
        offset = len(self._references)
        for size in self._sizes:
            tail = end[-size:]
            found = self._index.get(hash(tuple(tail)))
            if found is None:
                continue
            text, at = (tokens, found - offset) if found >= offset else (self._references, found)
            if text[at - size : at] == tail:
                yield found

    def _enter(self, text: list[int], ends: range, offset: int) -> None:
        """Enter the n-grams of `text` that end before `ends`; it begins at position `offset`."""
        for end in ends:
            for size in self._sizes:
                if size > end or text[end] == _END:
                    continue
                self._index[hash(tuple(text[end - size : end]))] = offset + end
