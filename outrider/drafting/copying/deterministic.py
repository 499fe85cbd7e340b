"""Copies from the text that a request says its output will be like (`Advice`).

RTP-LLM's `deterministic`: without `edit`, prompt lookup in the advice instead of the prompt; with
it, speculative edit (edit_cursor.py). A request without advice gets no guess.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Unpack

from outrider.drafting.confidence import confidences_of_match
from outrider.drafting.copying.base import NOTHING, Copied, CopyingProposer, Limits, Source
from outrider.drafting.copying.edit_cursor import EditCursor, Original
from outrider.drafting.proposer import Follower, SessionStart
from outrider.params import Advice, TokenIds

_COMPARED = 64  # tokens of the output's end


class DeterministicProposer(CopyingProposer):
    """Drafts the advice's next tokens, as many as wanted, since it is mostly right for long."""

    def __init__(self, *, max_draft_tokens: int = 128, **limits: Unpack[Limits]) -> None:
        super().__init__("deterministic", max_draft_tokens=max_draft_tokens, **limits)

    def _source(self, follower: Follower, start: SessionStart) -> _Advised:
        advice = start.advice
        room = min(self._max_tokens - len(follower.tokens), self.traits.max_model_len)
        if len(advice.token_ids) > room:  # what does not fit is left out
            advice = replace(advice, token_ids=advice.token_ids[: max(0, room)])
        if advice.token_ids and advice.edit:
            return _Edited(follower, advice, start.prompt_len)
        return _Advised(follower, advice, start.prompt_len)


class _Advised(Source):
    """One session: the advice's continuation of the output's end.

    At least `min_token_match` tokens agree. Of several such places, the one where most tokens agree
    is taken, also beyond `max_token_match`, which only limits the comparison of RTP-LLM.
    """

    def __init__(self, follower: Follower, advice: Advice, prompt_len: int) -> None:
        super().__init__(follower)
        self._prompt_len = prompt_len
        self._advice = advice
        self._original = Original(advice.token_ids, 1 if advice.edit else advice.min_token_match)

    @property
    def num_tokens(self) -> int:
        return len(self.follower.tokens) + len(self._advice.token_ids)

    def guess(self, path: TokenIds, wanted: int) -> Copied:
        tokens = self.follower.tokens
        end = [*tokens[max(self._prompt_len, len(tokens) - _COMPARED) :], *path][-_COMPARED:]
        best, place = 0, 0
        for candidate in self._original.places(end):
            agreed = self._original.agreement(end, candidate)
            if agreed > best:
                best, place = agreed, candidate
        if not best:
            return NOTHING
        copied = self._advice.token_ids[place + 1 : place + 1 + wanted]
        return Copied(copied, confidences_of_match(best, len(copied)))


class _Edited(_Advised):
    """One session whose output is the advice with changes.

    A session that is opened anew with a long output catches up over several rounds, without drafts,
    so that other sessions do not wait for it.
    """

    def __init__(self, follower: Follower, advice: Advice, prompt_len: int) -> None:
        super().__init__(follower, advice, prompt_len)
        self._cursor = EditCursor(self._original, advice.min_token_match)
        self._followed = prompt_len
        self._ahead: tuple[TokenIds, EditCursor] = ((), self._cursor)  # a guess that was followed
        self.commit()

    def commit(self) -> None:
        self._followed += self._cursor.follow(self.follower.tokens[self._followed :])
        self._ahead = (), self._cursor

    def guess(self, path: TokenIds, wanted: int) -> Copied:
        if self._followed < len(self.follower.tokens):
            return NOTHING
        cursor = self._after(path)
        copied = cursor.guess(wanted)
        return Copied(copied, confidences_of_match(cursor.agreed, len(copied)))

    def alternatives(self, path: TokenIds) -> TokenIds:
        cursor = self._after(path)
        self._ahead = path, cursor  # branching asks for one more token each time
        return tuple(dict.fromkeys((*cursor.guess(1), *cursor.unchanged)))

    def _after(self, path: TokenIds) -> EditCursor:
        known, cursor = self._ahead
        if path[: len(known)] != known:
            known, cursor = (), self._cursor
        if len(path) > len(known):
            cursor = cursor.clone()
            cursor.follow(path[len(known) :])
        return cursor
