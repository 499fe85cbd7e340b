"""The scorer of this process, as the gateway's pipeline sees it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from gateway.routing.pool import ScorerClient
from gateway.routing.rounds import Round, round_from_proto
from outrider.errors import UnavailableError
from outrider.v1 import scorer_pb2
from scorer_service.call import Serving
from scorer_service.servicer import ScorerServicer


class LocalScorer:
    """Implements `ScorerClient` within the process."""

    target = "in-process"
    serving = True
    in_flight = 0

    def __init__(self, servicer: ScorerServicer) -> None:
        self._servicer = servicer

    async def generate(
        self,
        request: scorer_pb2.ScorerServiceGenerateRequest,
        metadata: tuple[tuple[str, str], ...],
        timeout_s: float,
    ) -> AsyncGenerator[Round, None]:
        responses = self._servicer.generate(request, metadata, timeout_s)
        async with aclosing(responses) as stream:
            async for response in stream:
                yield round_from_proto(response)


class LocalPool:
    """Implements `Pool` with the scorer of this process."""

    def __init__(self, servicer: ScorerServicer, serving: Serving) -> None:
        self._engine = serving.engine
        self.scorers: tuple[ScorerClient, ...] = (LocalScorer(servicer),)
        self.max_model_len = serving.served.max_model_len
        self.vocab_size = serving.served.vocab_size
        self.adapters = serving.served.adapters

    @property
    def serving(self) -> tuple[ScorerClient, ...]:
        return self.scorers if self._engine.running else ()

    async def known(self, _timeout_s: float) -> None:
        """Its sizes are."""

    async def pick(
        self, _prompt: Sequence[int], _excluded: frozenset[ScorerClient], _timeout_s: float
    ) -> ScorerClient:
        if not self._engine.running:
            raise UnavailableError("The engine has broken down or stopped. Make another LLM.")
        return self.scorers[0]

    def mark_down(self, scorer: ScorerClient) -> None:
        """Nothing else could take the request."""
