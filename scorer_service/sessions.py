"""One running request as the RPC side sees it."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from outrider.types import Commit, Request, RequestStats

if TYPE_CHECKING:
    from scorer_service.drafting.attached import AttachedProposer
    from scorer_service.round_spans import RoundSpans

_DELIVERED_AT_ONCE: Final = 8
"""Messages to clients that the event loop writes before it looks for what has come."""


class Mailbox:
    """From the engine's events to one client's stream. Holds a request's output at most.

    After the first it gives out `interval` tokens at a time, but for the last.
    """

    def __init__(self, interval: int = 0) -> None:
        self._interval = interval
        self._held = 0  # tokens
        self._wanted = 0  # for the next message
        self._commits: list[Commit] = []
        self._error: Exception | None = None
        self._wake = asyncio.Event()

    def put(self, commit: Commit) -> None:
        self._commits.append(commit)
        self._held += len(commit.token_ids)
        if self._held >= self._wanted or commit.finish_reason is not None:
            self._wake.set()

    def fail(self, error: Exception) -> None:
        """End the stream with `error`, after the commits that came before."""
        self._error = error
        self._wake.set()

    async def take(self) -> list[Commit]:
        """All commits since the last call, when they are enough; raises what `fail` was given."""
        await self._wake.wait()
        if not self._commits and self._error is not None:
            raise self._error
        if self._error is None:
            self._wake.clear()
        commits, self._commits = self._commits, []
        self._held, self._wanted = 0, self._interval
        return commits


class Deliveries:
    """What waits to be put into mailboxes: a step's commits, a few at a time.

    The drafts that answer the step may come before all of its clients were written to. The engine
    waits for them, and no client notices that they were read first.
    """

    def __init__(self) -> None:
        self._left: deque[tuple[Mailbox, Commit]] = deque()

    def put(self, mailbox: Mailbox, commit: Commit) -> None:
        """Has `deliver` take it along."""
        self._left.append((mailbox, commit))

    def deliver(self) -> None:
        """Delivers the first few, and a few more whenever the loop has read what came."""
        self._deliver(min(_DELIVERED_AT_ONCE, len(self._left)))
        if self._left:
            asyncio.get_running_loop().call_soon(self.deliver)

    def finish(self) -> None:
        """Delivers all that is left."""
        self._deliver(len(self._left))

    def _deliver(self, count: int) -> None:
        for _ in range(count):
            mailbox, commit = self._left.popleft()
            mailbox.put(commit)


@dataclass(slots=True, eq=False)
class Session:
    """Only the hub writes it, on the event loop."""

    request: Request
    traceparent: str
    max_len: int  # committed tokens it can reach
    num_speculative_tokens: int  # K of this request; 0: not drafted for
    committed: list[int]
    num_draft_tokens: int  # the policy's latest advice
    mailbox: Mailbox = field(init=False)
    epoch: int = 0  # of the latest Open
    proposer: AttachedProposer | None = None
    drafted: bool = False  # a block came for this epoch: the proposer had room for it
    losses: Counter[str] = field(default_factory=Counter)  # Lost messages by proposer
    stats: RequestStats | None = None  # the latest that the engine told
    rounds: RoundSpans | None = None  # only of a request whose trace is sampled
    id: int = field(init=False)

    def __post_init__(self) -> None:
        self.id = self.request.session_id
        self.mailbox = Mailbox(self.request.stream_interval)

    @property
    def num_given_tokens(self) -> int:
        """The client's prompt, without what another scorer generated after it."""
        return len(self.request.prompt_token_ids) - self.request.num_resumed_tokens
