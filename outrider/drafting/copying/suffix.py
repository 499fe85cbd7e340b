"""SuffixDecoding: copies the most frequent continuation, here and in earlier responses.

Oliaro et al., "SuffixDecoding: Extreme Speculative Decoding for Emerging AI Applications" (arXiv
2411.04975). It needs no model and pays where requests repeat each other: agents, tools, samples of
one prompt. A draft is as long as the match that speaks for it, and may be empty.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, Unpack

import numpy as np

from outrider.drafting.confidence import confidences_of_odds
from outrider.drafting.copying import suffix_kernels as kernels
from outrider.drafting.copying.base import Copied, CopyingProposer, Limits, Source
from outrider.drafting.copying.suffix_kernels import END, ORDERS, Ints
from outrider.drafting.copying.suffix_settings import SuffixSettings
from outrider.drafting.proposer import Follower, SessionStart
from outrider.params import TokenIds

_PROMPT_TOKENS = 8  # the prompt's last tokens, which are remembered with a response
_ALTERNATIVES = 3
_SMALLEST = 256
_MAX_ROOM = 4  # times the tokens held; beyond, memory is given back
_MAX_PLACE = 2**31 - 1  # as links hold them
_NO_PATH: Ints = np.empty(0, np.int32)


class SuffixProposer(CopyingProposer):
    """Drafts from the session's own text and from responses to earlier requests of its tenant."""

    def __init__(
        self,
        settings: SuffixSettings | None = None,
        *,
        max_draft_tokens: int = 24,
        **limits: Unpack[Limits],
    ) -> None:
        super().__init__("suffix", max_draft_tokens=max_draft_tokens, **limits)
        self._settings = settings or SuffixSettings()
        self.responses = Responses(self._settings)

    def _source(self, follower: Follower, start: SessionStart) -> _Suffixes:
        return _Suffixes(follower, start, self.responses, self._settings)


class Responses:
    """The responses to earlier requests, by tenant; bounded, the oldest is forgotten first."""

    def __init__(self, settings: SuffixSettings) -> None:
        self._settings = settings
        self._by_tenant: dict[str, SuffixIndex] = {}
        self._sizes: deque[tuple[str, int]] = deque()  # tenant and tokens, the oldest first
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._sizes)

    def of(self, tenant: str) -> SuffixIndex | None:
        """Return the responses that a tenant's drafts may be copied from."""
        return self._by_tenant.get(self._partition(tenant))

    def add(self, tenant: str, token_ids: Sequence[int]) -> None:
        """Remember a response."""
        tenant, size = self._partition(tenant), len(token_ids) + 1
        settings = self._settings
        if settings.max_cached_requests == 0 or size > settings.max_cached_tokens:
            return
        while (
            len(self._sizes) >= settings.max_cached_requests
            or self.num_tokens + size > settings.max_cached_tokens
        ):
            self._forget_oldest()
        index = self._by_tenant.setdefault(tenant, SuffixIndex())
        index.append((*token_ids, END))  # the next one does not follow it
        self._sizes.append((tenant, size))
        self.num_tokens += size

    def _forget_oldest(self) -> None:
        tenant, size = self._sizes.popleft()
        self.num_tokens -= size
        self._by_tenant[tenant].drop(size)
        if not len(self._by_tenant[tenant]):
            del self._by_tenant[tenant]

    def _partition(self, tenant: str) -> str:
        return "" if self._settings.shared_across_tenants else tenant


class _Suffixes(Source):
    """One session: an index of its own text beside the responses of its tenant."""

    def __init__(
        self,
        follower: Follower,
        start: SessionStart,
        responses: Responses,
        settings: SuffixSettings,
    ) -> None:
        super().__init__(follower)
        self._tenant = start.tenant
        self._responses = responses
        self._settings = settings
        self._text = SuffixIndex(follower.tokens)
        self._prompt_len = start.prompt_len

    @property
    def num_tokens(self) -> int:
        return len(self._text)

    def commit(self) -> None:
        tokens = self.follower.tokens
        if tokens:
            self._text.append(tokens[len(self._text) :])
        else:  # too long: not drafted for any more
            self._text = SuffixIndex()

    def guess(self, path: TokenIds, wanted: int) -> Copied:
        settings, context = self._settings, self._context(path)
        own = self._text.draft(context, wanted, settings, _array(path))
        responses = self._responses.of(self._tenant)
        if responses is None:
            return own.copied
        earlier = responses.draft(context, wanted, settings)
        return own.copied if own.score >= earlier.score else earlier.copied

    def alternatives(self, path: TokenIds) -> list[int]:
        context = self._context(path)
        own = self._text.next_tokens(context, _ALTERNATIVES, _array(path))
        responses = self._responses.of(self._tenant)
        if responses is None:
            return own
        return list(dict.fromkeys((*own, *responses.next_tokens(context, _ALTERNATIVES))))

    def end(self) -> None:
        tokens = self.follower.tokens
        if len(tokens) > self._prompt_len:
            self._responses.add(self._tenant, tokens[max(0, self._prompt_len - _PROMPT_TOKENS) :])

    def _context(self, path: TokenIds) -> Ints:
        depth = self._settings.max_tree_depth
        return _array([*self.follower.tokens[-depth:], *path][-depth:])


class Found(NamedTuple):
    """A continuation and the sum of its tokens' estimated probabilities."""

    score: float
    copied: Copied


class SuffixIndex:
    """Token ids with links from each place to the last one that was preceded by the same tokens.

    Each token that there is room for takes 36 bytes, and there is room for at most four times the
    tokens held. Dropped tokens leave their room to later ones: nothing is moved.
    """

    def __init__(self, tokens: Sequence[int] | Ints = ()) -> None:
        self._begin(tokens)

    def _begin(self, tokens: Sequence[int] | Ints) -> None:
        """Hold just these, in new arrays."""
        room = _room(len(tokens))
        self._text = kernels.Text(
            tokens=np.empty(room, np.int32),
            links=np.empty((ORDERS, room), np.int32),
            heads=np.full((ORDERS, room), -1, np.int32),
            start=0,
            end=0,
        )
        self.append(tokens)

    def __len__(self) -> int:
        return self._text.end - self._text.start

    def append(self, tokens: Sequence[int] | Ints) -> None:
        """Continue the text."""
        if self._text.end + len(tokens) > _MAX_PLACE:
            self._begin(self._held())
        text = self._text
        copies = _room(len(self) + len(tokens)) // len(text.tokens)
        if copies > 1:
            # A place finds itself in one of the copies, an n-gram the head of its old slot.
            text = text._replace(
                tokens=np.tile(text.tokens, copies),
                links=np.tile(text.links, copies),
                heads=np.tile(text.heads, copies),
            )
        fresh = np.array(tokens, np.int32)
        kernels.enter(text, fresh)
        self._text = text._replace(end=text.end + len(fresh))

    def drop(self, num_tokens: int) -> None:
        """Forget the first tokens."""
        self._text = self._text._replace(start=self._text.start + num_tokens)
        if _SMALLEST < len(self._text.tokens) > _MAX_ROOM * len(self):
            self._begin(self._held())

    def draft(
        self, context: Ints, wanted: int, settings: SuffixSettings, path: Ints | None = None
    ) -> Found:
        """Return at most `wanted` tokens; see `suffix_kernels.best_draft`.

        With `path` the text is the context's own.
        """
        draft, odds = np.empty(wanted, np.int32), np.empty(wanted, np.float64)
        own, path = path is not None, _NO_PATH if path is None else path
        factor, min_prob = settings.max_spec_factor, settings.min_token_prob
        score, length = kernels.best_draft(
            self._text, context, path, own, factor, min_prob, draft, odds
        )
        told = confidences_of_odds(odds[:length])
        return Found(score, Copied(draft[:length].tolist(), told))

    def next_tokens(self, context: Ints, count: int, path: Ints | None = None) -> list[int]:
        """Return at most `count` tokens; see `suffix_kernels.next_tokens`."""
        found = np.empty(count, np.int32)
        length = kernels.next_tokens(self._text, context, _NO_PATH if path is None else path, found)
        return [int(token) for token in found[:length]]

    def _held(self) -> Ints:
        text = self._text
        held: Ints = text.tokens[np.arange(text.start, text.end) % len(text.tokens)]
        return held


def _room(num_tokens: int) -> int:
    """Return a power of two."""
    return max(_SMALLEST, 1 << (num_tokens - 1).bit_length())


def _array(tokens: Sequence[int]) -> Ints:
    return np.array(tokens, np.int32) if tokens else _NO_PATH
