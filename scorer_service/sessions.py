"""One running request, as the RPC side of a scorer sees it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Protocol

from outrider.features import FeatureRows
from outrider.policy.row import SAMPLED_TEMPERATURE
from outrider.types import Request, RequestStats
from scorer_service.mailbox import Mailbox
from scorer_service.round_spans import RoundSpans


class SessionListener(Protocol):
    """Listener for events of a proposer's sessions. Used on the event loop."""

    @property
    def overflowed(self) -> bool:
        """Return whether too much waits to be read."""

    @property
    def crowded(self) -> bool:
        """Return whether so much waits that sessions are better opened later."""

    @property
    def num_closing(self) -> int:
        """Number of ended sessions that the proposer still counts."""

    def open(self, session: Session) -> None: ...

    def commit(self, session: Session, step_us: int) -> None: ...

    def features(self, rows: FeatureRows) -> None: ...

    def close(self, session: Session) -> None: ...


class SessionProposer(Protocol):
    """The proposer of a session, as far as sessions need it."""

    id: str
    max_model_len: int
    set_aside_until: float  # loop time; until then others are preferred
    sessions: dict[int, Session]
    outbox: SessionListener

    def round_done(self, session: Session, accepted: int) -> None: ...


@dataclass(slots=True, eq=False)
class Session:
    """A running request. Only the hub and its registry write it, on the event loop."""

    request: Request
    traceparent: str
    max_len: int  # committed tokens it can reach
    num_speculative_tokens: int  # K of this request; 0: not drafted for
    committed: list[int]  # only the prompt where it is not drafted for
    num_draft_tokens: int  # the policy's latest advice, where it is drafted for
    mailbox: Mailbox = field(init=False)
    epoch: int = 0  # of the latest Open
    proposer: SessionProposer | None = None
    drafted: bool = False  # a block came for this epoch: the proposer had room for it
    in_vain: bool = False  # its row awaited drafts of this epoch in vain
    losses: Counter[str] = field(default_factory=Counter)  # Lost messages by proposer
    stats: RequestStats | None = None  # the engine's latest
    rounds: RoundSpans | None = None  # only of a request whose trace is sampled
    id: int = field(init=False)
    sampled: bool = field(init=False)  # its temperature makes drafts meet clearly less

    def __post_init__(self) -> None:
        self.id = self.request.session_id
        self.mailbox = Mailbox(self.request.stream_interval)
        self.sampled = self.request.sampling.temperature >= SAMPLED_TEMPERATURE

    @property
    def num_given_tokens(self) -> int:
        """Tokens of the client's prompt, without output of another scorer after it."""
        return len(self.request.prompt_token_ids) - self.request.num_resumed_tokens
