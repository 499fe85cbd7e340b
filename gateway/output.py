"""From scorer tokens to the text a client sees: detokenised, and cut at the stop strings."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gateway.stop_strings import StopStringMatcher
from outrider.models.detokenizer import Detokenizer
from outrider.types import TokenKind, TokenLogprobs


@dataclass(frozen=True, slots=True)
class OutputToken:
    """A token of the completion and what it adds to the text."""

    id: int
    kind: TokenKind
    text: str
    logprobs: TokenLogprobs | None = None  # if the request asks for them


class OutputAssembler:
    """One completion's output.

    Tokens are held back, with their text, while a character is incomplete or while the end of the
    text may begin a stop string. The tokens released are the completion: the concatenation of
    their texts is its text. Stop strings within the first `min_tokens` tokens do not count.
    """

    def __init__(
        self, detokenizer: Detokenizer, stop_strings: Sequence[str], min_tokens: int = 0
    ) -> None:
        self._detokenizer = detokenizer
        self._matcher = StopStringMatcher(stop_strings)
        self._min_tokens = min_tokens
        self._held: deque[OutputToken] = deque()
        self._held_chars = 0
        self._seen = 0
        self.stopped = False
        self.released = 0

    def push(
        self, token_id: int, kind: TokenKind, logprobs: TokenLogprobs | None = None
    ) -> list[OutputToken]:
        """Return the tokens that became certain; set `stopped` once a stop string has appeared."""
        assert not self.stopped
        self._seen += 1
        token = OutputToken(token_id, kind, self._detokenizer.push(token_id), logprobs)
        self._held.append(token)
        self._held_chars += len(token.text)
        if self._match(token.text):
            return self._release(len(self._held))
        if not self._detokenizer.complete:
            return []
        return self._release(self._certain())

    def finish(self) -> list[OutputToken]:
        """Return the tokens that are left when the scorer has ended the completion."""
        rest = "" if self.stopped else self._detokenizer.flush()
        if rest:  # an incomplete character kept its token here
            self._held[-1] = replace(self._held[-1], text=self._held[-1].text + rest)
            self._held_chars += len(rest)
            self._match(rest)
        return self._release(len(self._held))

    def _match(self, piece: str) -> bool:
        """Look for a stop string; at a match, drops what is behind the match's begin."""
        excess = self._matcher.feed(piece) if self._seen > self._min_tokens else None
        if excess is None:
            return False
        self.stopped = True
        while self._held:
            token = self._held[-1]
            if len(token.text) > excess:  # its text begins before the match: it stays
                self._held[-1] = replace(token, text=token.text[: len(token.text) - excess])
                break
            excess -= len(token.text)
            self._held.pop()
        return True

    def _certain(self) -> int:
        """How many held tokens end before anything that may begin a stop string."""
        certain, end = 0, 0
        for token in self._held:
            end += len(token.text)
            if end > self._held_chars - self._matcher.pending:
                break
            certain += 1
        return certain

    def _release(self, count: int) -> list[OutputToken]:
        tokens = [self._held.popleft() for _ in range(count)]
        self._held_chars -= sum(len(token.text) for token in tokens)
        self.released += count
        return tokens
