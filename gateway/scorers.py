"""The scorers: which of them serve, and which one a request goes to."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from array import array
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.errors import ConfigError, OutriderError, UnavailableError
from outrider.rpc.channel import open_channel
from outrider.rpc.status import from_rpc_error
from outrider.v1 import scorer_pb2, scorer_pb2_grpc

_SERVICE = "outrider.v1.ScorerService"
_PROBE_TIMEOUT_S = 2.0
_PROBE_UP_S, _PROBE_DOWN_S = 1.0, 0.2
_AFFINITY_TOKENS = 16  # a page: what a scorer can have in its prefix cache
_AFFINITY_SLACK = 4  # requests more than the runner-up before affinity gives way to load
_log = logging.getLogger(__name__)


class Scorer:
    """One scorer as this gateway sees it. The pool alone changes `serving`."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.serving = False
        self.in_flight = 0
        self.info = scorer_pb2.GetScorerInfoResponse()
        self._channel = open_channel(target)
        self._stub = scorer_pb2_grpc.ScorerServiceStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)

    async def generate(
        self,
        request: scorer_pb2.ScorerServiceGenerateRequest,
        metadata: tuple[tuple[str, str], ...],
        timeout_s: float,
    ) -> AsyncGenerator[scorer_pb2.ScorerServiceGenerateResponse, None]:
        """The scorer's answer; closing the iterator cancels the RPC. Raises `AioRpcError`."""
        call = self._stub.Generate(request, metadata=metadata, timeout=timeout_s)
        self.in_flight += 1
        try:
            async for response in call:
                yield response
        finally:
            self.in_flight -= 1
            call.cancel()

    async def probe(self) -> bool:
        """Whether it says that it serves."""
        try:
            answer = await self._health.Check(
                health_pb2.HealthCheckRequest(service=_SERVICE), timeout=_PROBE_TIMEOUT_S
            )
        except grpc.aio.AioRpcError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    async def fetch_info(self) -> None:
        """Raises `OutriderError`."""
        try:
            self.info = await self._stub.GetScorerInfo(
                scorer_pb2.GetScorerInfoRequest(), timeout=_PROBE_TIMEOUT_S
            )
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error

    async def close(self) -> None:
        await self._channel.close()


class ScorerPool:
    """Watches the scorers and chooses among those that serve.

    `check` raises `ConfigError` for a scorer whose info does not fit this gateway; such a scorer
    is never used, and it fails the start.
    """

    def __init__(
        self,
        targets: Sequence[str],
        check: Callable[[scorer_pb2.GetScorerInfoResponse], None],
    ) -> None:
        self.scorers = tuple(Scorer(target) for target in dict.fromkeys(targets))
        self._check = check
        self._changed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._misfits: dict[str, ConfigError] = {}

    async def start(self, timeout_s: float) -> None:
        """Returns once a scorer serves.

        Raises `ConfigError` if one does not fit, or if none serves within `timeout_s`.
        """
        self._tasks = [asyncio.create_task(self._watch(scorer)) for scorer in self.scorers]
        try:
            async with asyncio.timeout(timeout_s):
                while not self.serving and not self._misfits:
                    await self._wait_change()
        except TimeoutError as error:
            targets = ", ".join(scorer.target for scorer in self.scorers)
            raise ConfigError(
                f"no scorer served within {timeout_s:g} s at {targets}: "
                "is one running there, and is the address right?"
            ) from error
        if self._misfits:
            raise next(iter(self._misfits.values()))

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(scorer.close() for scorer in self.scorers))

    @property
    def serving(self) -> tuple[Scorer, ...]:
        return tuple(scorer for scorer in self.scorers if scorer.serving)

    @property
    def max_model_len(self) -> int:
        """Tokens that a request can reach on every scorer known so far."""
        return min((s.info.max_model_len for s in self.scorers if s.info.max_model_len), default=0)

    @property
    def vocab_size(self) -> int:
        return min((s.info.vocab_size for s in self.scorers if s.info.vocab_size), default=0)

    async def pick(
        self, prompt_token_ids: Sequence[int], excluded: frozenset[Scorer], timeout_s: float
    ) -> Scorer:
        """The scorer for a prompt, waiting at most `timeout_s` until one serves.

        Rendezvous hashing sends prompts with the same first page to the same scorer, unless the
        second choice is clearly less busy. Raises `UnavailableError`.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while not (candidates := set(self.serving) - excluded):
                    await self._wait_change()
        except TimeoutError as error:
            raise UnavailableError("No scorer can be reached. Try again soon.") from error
        page = array("I", prompt_token_ids[:_AFFINITY_TOKENS]).tobytes()
        ranked = sorted(candidates, key=lambda scorer: _rendezvous(scorer.target, page))
        first, second = ranked[0], ranked[min(1, len(ranked) - 1)]
        return second if first.in_flight > second.in_flight + _AFFINITY_SLACK else first

    def mark_down(self, scorer: Scorer) -> None:
        """A request could not reach it: it gets none until a probe succeeds."""
        self._set_serving(scorer, False)

    async def _watch(self, scorer: Scorer) -> None:
        while True:
            healthy = await scorer.probe()
            if healthy and not scorer.serving:  # new or restarted: maybe another model
                healthy = await self._admit(scorer)
            self._set_serving(scorer, healthy)
            await asyncio.sleep(_PROBE_UP_S if healthy else _PROBE_DOWN_S)

    async def _admit(self, scorer: Scorer) -> bool:
        try:
            await scorer.fetch_info()
            self._check(scorer.info)
        except ConfigError as error:
            if scorer.target not in self._misfits:
                _log.error("scorer %s does not fit: %s", scorer.target, error.message)
            self._misfits[scorer.target] = error
            self._notify()
            return False
        except OutriderError as error:
            _log.warning("scorer %s gives no information: %s", scorer.target, error.message)
            return False
        self._misfits.pop(scorer.target, None)
        return True

    def _set_serving(self, scorer: Scorer, serving: bool) -> None:
        if scorer.serving == serving:
            return
        _log.info("scorer %s is %s", scorer.target, "serving" if serving else "not serving")
        scorer.serving = serving
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _wait_change(self) -> None:
        await self._changed.wait()


def _rendezvous(target: str, page: bytes) -> bytes:
    return hashlib.blake2b(target.encode() + b"\0" + page, digest_size=8).digest()


@contextlib.asynccontextmanager
async def opened(pool: ScorerPool, start_timeout_s: float) -> AsyncIterator[ScorerPool]:
    """A started pool that is stopped at the end, also if the start fails."""
    try:
        await pool.start(start_timeout_s)
        yield pool
    finally:
        await pool.stop()
