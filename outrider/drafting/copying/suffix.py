"""SuffixDecoding: copies what most often followed such a text, here and in earlier responses.

Oliaro et al., "SuffixDecoding: Extreme Speculative Decoding for Emerging AI Applications" (arXiv
2411.04975). It needs no model and pays where requests repeat each other: agents, tools, samples of
one prompt. A draft is as long as the match that speaks for it, and may be empty.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Unpack

import numpy as np

from outrider.drafting.copying.base import CopyingProposer, Limits
from outrider.drafting.copying.suffix_index import NO_PATH, NOTHING, SuffixIndex
from outrider.drafting.copying.suffix_kernels import Ints
from outrider.drafting.copying.suffix_settings import SuffixSettings
from outrider.drafting.proposer import Follower, SessionStart
from outrider.params import TokenIds

_LED_BY = 8  # tokens of the prompt that a response is remembered with
_ALTERNATIVES = 3


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
    """What earlier requests were answered, by tenant; bounded, the oldest is forgotten first."""

    def __init__(self, settings: SuffixSettings) -> None:
        self._settings = settings
        self._by_tenant: dict[str, SuffixIndex] = {}
        self._sizes: deque[tuple[str, int]] = deque()  # tenant and tokens, the oldest first
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._sizes)

    def of(self, tenant: str) -> SuffixIndex | None:
        """What may be copied from for a tenant."""
        return self._by_tenant.get(self._partition(tenant))

    def add(self, tenant: str, token_ids: Sequence[int]) -> None:
        """Remembers a response."""
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
        index.append(token_ids)
        index.end_document()
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


class _Suffixes:
    """One session: an index of its own text beside the responses of its tenant."""

    def __init__(
        self,
        follower: Follower,
        start: SessionStart,
        responses: Responses,
        settings: SuffixSettings,
    ) -> None:
        self._follower = follower
        self._tenant = start.tenant
        self._responses = responses
        self._settings = settings
        self._text = SuffixIndex(follower.tokens)
        self._prompt_len = start.prompt_len

    @property
    def num_tokens(self) -> int:
        return len(self._text)

    def commit(self) -> None:
        tokens = self._follower.tokens
        if tokens:
            self._text.append(tokens[len(self._text) :])
        else:  # too long: not drafted for any more
            self._text = SuffixIndex()

    def read(self, most: int) -> int:  # noqa: ARG002
        return 0  # 2 ms for 32k tokens: that was done when they came

    def guess(self, path: TokenIds, wanted: int) -> list[int]:
        settings, context = self._settings, self._context(path)
        factor, min_prob = settings.max_spec_factor, settings.min_token_prob
        own = self._text.draft(
            context, wanted, factor=factor, min_prob=min_prob, path=_array(path), own=True
        )
        responses = self._responses.of(self._tenant)
        earlier = NOTHING
        if responses is not None:
            earlier = responses.draft(context, wanted, factor=factor, min_prob=min_prob)
        return own.token_ids if own.score >= earlier.score else earlier.token_ids

    def alternatives(self, path: TokenIds) -> list[int]:
        context = self._context(path)
        own = self._text.next_tokens(context, _ALTERNATIVES, path=_array(path), own=True)
        responses = self._responses.of(self._tenant)
        if responses is None:
            return own
        return list(dict.fromkeys((*own, *responses.next_tokens(context, _ALTERNATIVES))))

    def end(self) -> None:
        tokens = self._follower.tokens
        if len(tokens) > self._prompt_len:
            self._responses.add(self._tenant, tokens[max(0, self._prompt_len - _LED_BY) :])

    def _context(self, path: TokenIds) -> Ints:
        depth = self._settings.max_tree_depth
        return _array([*self._follower.tokens[-depth:], *path][-depth:])


def _array(tokens: Sequence[int]) -> Ints:
    return np.array(tokens, np.int32) if tokens else NO_PATH
