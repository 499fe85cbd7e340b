"""An attached proposer, with what its Hello said and its sessions."""

from __future__ import annotations

import asyncio
from typing import Final

from outrider.errors import CapacityError, OutriderError, ProposerRefusedError
from outrider.features import FeatureOrder, FeatureSpec, FeatureWindow
from outrider.methods import COPYING_METHODS, METHODS, SELF_LIMITING_METHODS
from outrider.params import MAX_SPECULATIVE_TOKENS, require
from outrider.rpc.versions import agreed_version
from outrider.v1 import draft_pb2
from scorer_service.config import DraftLimits, ServedModel
from scorer_service.drafting.outbox import Outbox
from scorer_service.sessions import Session, SessionListener

_MAX_NAME_CHARS: Final = {
    "proposer_id": 256,
    "pool": 256,
    "model": 1024,
    "method": 64,
    "tokenizer_hash": 64,
    "device": 256,
}


KNOWN_ROUNDS: Final = 64  # that tell what drafts are worth: the mean of fewer is luck
WORTH_ROUNDS: Final = 512  # over which that is forgotten


class AttachedProposer:
    """A proposer and its sessions. Only the registry writes it, on the event loop."""

    def __init__(
        self,
        hello: draft_pb2.Hello,
        served: ServedModel,
        limits: DraftLimits,
        features: FeatureSpec | None = None,
        listener: SessionListener | None = None,
    ) -> None:
        self.id: str = hello.proposer_id
        self.incarnation: int = hello.incarnation
        self.method: str = hello.method
        self.pool: str = hello.pool or "default"
        self.methods: tuple[str, ...] = tuple(hello.methods) or (hello.method,)
        self.model: str = hello.model
        self.max_sessions: int = min(hello.max_sessions, limits.max_sessions)
        self.max_draft_tokens: int = hello.max_draft_tokens
        self.runs_ahead: bool = hello.runs_ahead
        # An unknown device may be the scorer's.
        self.own_device = served.device != "" and hello.device not in ("", served.device)
        self.colocated = listener is not None
        self.max_model_len: int = hello.max_model_len or served.max_model_len
        self.sessions: dict[int, Session] = {}
        self.limit = self.max_sessions
        """Sessions that it may have: fewer while other scorers' sessions fill it."""
        self.full_until = 0.0  # loop time; then one more session is tried
        self.probing = False  # one more session was tried, and its first draft lets others follow
        self.outbox: SessionListener = listener or Outbox(limits.max_backlog_tokens, self.methods)
        self.features = features
        self.window, self.prompt_window = FeatureWindow(), FeatureWindow()
        self.ready = True  # False until the scorer has the projection that it needs
        self.draining = False  # said Goodbye
        self.set_aside_until = 0.0  # loop time; until then others are preferred
        self.bad_blocks = 0
        self._worth: dict[bool, tuple[float, int]] = {}  # of sampled texts or others: mean, rounds
        self.detached: asyncio.Future[OutriderError | None] = (
            asyncio.get_running_loop().create_future()
        )
        """Done once the registry has detached it: the error that its stream should end with."""

    def round_done(self, session: Session, accepted: int) -> None:
        """Take in a round of a session that was to have a draft, and how much of it came true."""
        mean, rounds = self._worth.get(session.sampled, (0.0, 0))
        rounds = min(rounds + 1, WORTH_ROUNDS)
        self._worth[session.sampled] = mean + (accepted - mean) / rounds, rounds

    def worth(self, session: Session) -> float | None:
        """Return the draft tokens a round that come true for such sessions; None if unknown."""
        mean, rounds = self._worth.get(session.sampled, (0.0, 0))
        return mean if rounds >= KNOWN_ROUNDS else None

    @property
    def load(self) -> float:
        return len(self.sessions) / self.max_sessions

    @property
    def num_held(self) -> int:
        """Number of sessions that take a place."""
        return len(self.sessions) + self.outbox.num_closing

    @property
    def has_room(self) -> bool:
        full = self.num_held >= self.limit or self.outbox.crowded
        return self.ready and not full and not self.draining

    def feature_order(self, session: Session) -> FeatureOrder | None:
        """Return the order of hidden states for a session's latest Open."""
        if self.features is None:
            return None
        return FeatureOrder(session.epoch, self.features, self.window, self.prompt_window)

    def methods_for(self, session: Session) -> tuple[str, ...]:
        """Return the methods that may draft for a session, its preferred one first."""
        speculation = session.request.speculation
        useless = () if speculation.advice.token_ids else ("deterministic",)
        return tuple(
            name
            for name in speculation.methods or METHODS
            if name in self.methods and name not in useless
        )

    def fits(self, session: Session) -> bool:
        """Return whether it may draft for the session, room aside."""
        return bool(self.methods_for(session)) and len(session.committed) < self.max_model_len

    def preference(self, session: Session) -> tuple[int, int]:
        """Return a key that is smaller the better the proposer suits the session."""
        methods = self.methods_for(session)
        order = session.request.speculation.methods or METHODS
        return order.index(methods[0]), -len(methods)

    def draft_limit(self, session: Session) -> int:
        """Return the most draft tokens per round.

        Where the request names no number, the scorer's default bounds most methods. Those that
        draft no more than they are sure of may draft as much as they can.
        """
        limit = session.num_speculative_tokens
        asked = session.request.speculation.num_speculative_tokens
        if (
            asked is None
            and limit
            and not SELF_LIMITING_METHODS.isdisjoint(self.methods_for(session))
        ):
            limit = MAX_SPECULATIVE_TOKENS
        return min(limit, self.max_draft_tokens)


def check_hello(hello: draft_pb2.Hello, served: ServedModel) -> None:
    """Raise `ProposerRefusedError` with the reasons of draft.proto, or `InvalidRequestError`."""
    agreed_version(hello.protocol_version)
    for name in ("proposer_id", "max_sessions", "max_draft_tokens"):
        require(bool(getattr(hello, name)), name, "set")
    for name, most in _MAX_NAME_CHARS.items():  # for logs and labels of metrics
        text = getattr(hello, name)
        fits = len(text) <= most and text.isprintable()
        require(fits, name, f"at most {most} printable characters")
    # Checked first, since going through many methods takes time.
    require(len(hello.methods) <= len(METHODS), "methods", f"at most {len(METHODS)}")
    methods = tuple(hello.methods) or (hello.method,)
    require(len(methods) == len(set(methods)), "methods", "different from each other")
    for method in (hello.method, *methods):
        if method not in METHODS:
            raise ProposerRefusedError(
                f"unknown method {method!r}; this scorer knows {', '.join(METHODS)}",
                reason="UNKNOWN_METHOD",
            )
    require(hello.method == methods[0], "method", "the first of methods")
    copies = COPYING_METHODS.issuperset(methods)
    theirs, ours = hello.tokenizer_hash, served.tokenizer_hash
    # Models of a family pad their vocabularies differently, beyond the tokenizer's ids.
    smaller = theirs == ours != "" and 0 < hello.vocab_size < served.vocab_size
    fits = smaller or hello.vocab_size == served.vocab_size
    if not fits and not (copies and hello.vocab_size == 0):
        raise ProposerRefusedError(
            f"the draft's vocabulary has {hello.vocab_size} tokens, the target's "
            f"{served.vocab_size}: use a draft with the target's tokenizer and no more tokens",
            reason="VOCAB_MISMATCH",
        )
    if ours and theirs != ours and not (copies and not theirs):
        raise ProposerRefusedError(
            f"the draft's tokenizer ({theirs[:12] or 'none'}) is not the target's ({ours[:12]}): "
            "the same id would mean different text",
            reason="TOKENIZER_MISMATCH",
        )


def overflow_error(limits: DraftLimits) -> CapacityError:
    """Return the error for a proposer that does not read."""
    return CapacityError(
        f"more than {limits.max_backlog_tokens} tokens wait to be read: the proposer is too slow",
        retry_after_s=limits.set_aside_s,
    )
