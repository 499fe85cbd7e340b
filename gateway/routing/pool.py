"""The scorers as generation sees them, wherever they run."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

from gateway.routing.rounds import Round
from outrider.v1 import scorer_pb2


class ScorerClient(Protocol):
    """One scorer."""

    target: str
    """Its address, for logs and traces."""
    serving: bool
    in_flight: int

    def generate(
        self,
        request: scorer_pb2.ScorerServiceGenerateRequest,
        metadata: tuple[tuple[str, str], ...],
        timeout_s: float,
    ) -> AsyncGenerator[Round, None]:
        """Yield the scorer's answer; closing the iterator aborts the request.

        Raises `OutriderError`s.
        """


class ModelLimits(Protocol):
    """Tells what requests to one model must keep to."""

    @property
    def max_model_len(self) -> int:
        """Return the tokens that a request can reach on every scorer known so far."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def adapters(self) -> Sequence[str]:
        """Return the adapters that every scorer known so far has."""


class Pool(ModelLimits, Protocol):
    """The scorers of one model."""

    @property
    def scorers(self) -> Sequence[ScorerClient]: ...

    @property
    def serving(self) -> Sequence[ScorerClient]: ...

    async def known(self, timeout_s: float) -> None:
        """Wait at most `timeout_s` until `max_model_len` and `vocab_size` are known.

        Raises `UnavailableError`.
        """

    async def pick(
        self,
        prompt_token_ids: Sequence[int],
        excluded: frozenset[ScorerClient],
        timeout_s: float,
    ) -> ScorerClient:
        """Choose the scorer for a prompt, waiting at most `timeout_s` until one serves.

        Raises `UnavailableError`.
        """

    def mark_down(self, scorer: ScorerClient) -> None:
        """Send no requests to a scorer that one could not reach, until it serves again."""
