"""The limits of this process's scorer, as the gateway's checks see them."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.routing.pool import ScorerClient
from outrider.errors import UnavailableError
from scorer_service.call import Serving


class LocalPool:
    """Implements `Pool` for checks of requests, which go to the engine without it."""

    scorers: tuple[ScorerClient, ...] = ()
    serving: tuple[ScorerClient, ...] = ()

    def __init__(self, serving: Serving) -> None:
        self.max_model_len = serving.served.max_model_len
        self.vocab_size = serving.served.vocab_size
        self.adapters = serving.served.adapters

    async def known(self, _timeout_s: float) -> None:
        """Its sizes are."""

    async def pick(
        self, _prompt: Sequence[int], _excluded: frozenset[ScorerClient], _timeout_s: float
    ) -> ScorerClient:
        raise UnavailableError("Requests go to the engine of this process.")

    def mark_down(self, scorer: ScorerClient) -> None:
        """There is none."""
