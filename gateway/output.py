"""From scorer tokens to the text a client sees: detokenised, and cut at the stop strings."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

from gateway.stop_strings import StopStringMatcher
from outrider.models.detokenizer import Detokenizer
from outrider.types import TokenKind, TokenLogprobs


class OutputToken(NamedTuple):  # one per token: a frozen dataclass takes three times as long
    """A token of the completion and what it adds to the text."""

    id: int
    kind: TokenKind
    text: str
    logprobs: TokenLogprobs | None = None  # if the request asks for them


_new_output_token = partial(tuple.__new__, OutputToken)  # four times as fast as its own


@dataclass(slots=True)
class _Held:
    """A token that a stop string may still cut off."""

    token: OutputToken
    spelled: str  # its text, or a special token as it is written
    unfinished: bool  # a later token completes its last character


class OutputAssembler:
    """One completion's output.

    Tokens are held back, with their text, while a character is incomplete or while the end of the
    text may begin a stop string. The tokens released are the completion: the concatenation of
    their texts is its text. Stop strings within the first `min_tokens` tokens do not count.

    Special tokens have no text but for those `shown`, by id. `spelled_stops` are stop strings that
    name some, as `spell_special` writes them ("" for any other token): they are looked for in the
    text with special tokens.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        stop_strings: Sequence[str],
        min_tokens: int = 0,
        *,
        spelled_stops: Sequence[str] = (),
        spell_special: Callable[[int], str] = lambda _: "",
        shown: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        self._detokenizer = detokenizer
        self._matcher = StopStringMatcher(stop_strings)
        self._spelled_matcher = StopStringMatcher(spelled_stops)
        self._spell_special = spell_special
        self._shown = shown
        self._stops = bool(stop_strings or spelled_stops)
        self._min_tokens = min_tokens
        self._held: deque[_Held] = deque()
        self._seen = 0
        self.stop_string: str | None = None  # that has appeared
        self.released = 0

    @property
    def stopped(self) -> bool:
        return self.stop_string is not None

    def push(
        self,
        token_ids: Sequence[int],
        kinds: Sequence[TokenKind],
        logprobs: Sequence[TokenLogprobs] = (),
    ) -> list[OutputToken]:
        """Return the tokens that became certain; `logprobs` are one for each token, or none.

        Sets `stop_string` once one has appeared; the tokens behind it are left.
        """
        assert not self.stopped
        scores: Sequence[TokenLogprobs | None] = logprobs or (None,) * len(token_ids)
        if not (self._stops or self._held or self._shown):  # by far the most common case
            texts = self._detokenizer.push_whole(token_ids)
            if texts is not None:
                self._seen += len(texts)
                self.released += len(texts)
                columns = zip(token_ids, kinds, texts, scores, strict=True)
                return list(map(_new_output_token, columns))
        released: list[OutputToken] = []
        detokenizer, held = self._detokenizer, self._held
        for token_id, kind, score in zip(token_ids, kinds, scores, strict=True):
            self._seen += 1
            if token_id in self._shown:
                if self._end_character():
                    released += self._release(len(held))
                    break
                text = self._shown[token_id]
            else:
                text = detokenizer.push(token_id)
            complete = detokenizer.complete
            token = OutputToken(token_id, kind, text, score)
            if complete and not self._stops and not held:
                released.append(token)
                continue
            spelled = text or self._spell_special(token_id)
            held.append(_Held(token, spelled, unfinished=not complete))
            if text and token_id not in self._shown:
                self._share_out()
            if self._match(text, spelled):
                released += self._release(len(held))
                break
            if complete:
                released += self._release(self._certain())
        self.released += len(released)
        return released

    def finish(self) -> list[OutputToken]:
        """Return the tokens that are left when the scorer has ended the completion."""
        if not self.stopped:
            self._end_character()
        tokens = self._release(len(self._held))
        self.released += len(tokens)
        return tokens

    def _end_character(self) -> bool:
        """Take in what is there of an incomplete character; return whether a stop string ends."""
        if not (rest := self._detokenizer.flush()):
            return False
        last = self._held[-1]  # an incomplete character kept its token here
        last.token = last.token._replace(text=last.token.text + rest)
        last.spelled += rest
        self._share_out()
        return self._match(rest, rest)

    def _share_out(self) -> None:
        """Give the text that was held back for several tokens to those it belongs to."""
        parts = self._detokenizer.parts
        begun = False  # a character, by the tokens so far
        for held, text in zip(list(self._held)[-len(parts) :] if parts else (), parts, strict=True):
            if text is not None:
                begun = not text
                held.spelled, held.token = text, held.token._replace(text=text)
            held.unfinished = begun and held is not self._held[-1]

    def _match(self, text: str, spelled: str) -> bool:
        """Look for a stop string; at a match, drop what is behind the match's begin."""
        if self._seen <= self._min_tokens:
            return False
        excess, spelled_excess = self._matcher.feed(text), self._spelled_matcher.feed(spelled)
        if excess is None and spelled_excess is None:
            return False
        if excess is not None:
            self.stop_string = self._matcher.found
            self._drop(excess, lambda held: held.token.text)
        else:
            assert spelled_excess is not None
            self.stop_string = self._spelled_matcher.found
            self._drop(spelled_excess, lambda held: held.spelled)
        return True

    def _drop(self, excess: int, text_of: Callable[[_Held], str]) -> None:
        """Cut the last `excess` characters off; a token goes with the first of its characters."""
        while excess:
            last = self._held[-1]
            length = len(text_of(last))
            if length > excess:  # its text begins before the match: it stays
                text = last.token.text
                last.token = last.token._replace(text=text[: max(0, len(text) - excess)])
                return
            excess -= length
            self._held.pop()
        while self._held and self._held[-1].unfinished and not self._held[-1].token.text:
            self._held.pop()  # the first bytes of a character that was cut off

    def _certain(self) -> int:
        """Return how many held tokens end before anything that may begin a stop string."""
        certain, left = len(self._held), self._matcher.pending
        spelled_left = self._spelled_matcher.pending
        for held in reversed(self._held):
            if left <= 0 and spelled_left <= 0:
                break
            certain -= 1
            left -= len(held.token.text)
            spelled_left -= len(held.spelled)
        while certain and self._held[certain - 1].unfinished:
            certain -= 1  # the token that completes its character may be cut off
        return certain

    def _release(self, count: int) -> list[OutputToken]:
        return [self._held.popleft().token for _ in range(count)]
