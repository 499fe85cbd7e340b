"""The scorers: which of them serve, and which one a request goes to."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable
from typing import TypeVar

from gateway.routing.scorer import CLOSE_GRACE_S, Scorer
from outrider.errors import ConfigError, OutriderError, UnavailableError
from outrider.rpc.deployment import TlsFiles
from outrider.rpc.targets import Target, Targets
from outrider.rpc.tasks import Background
from outrider.v1 import scorer_pb2

_PROBE_UP_S, _PROBE_DOWN_S = 1.0, 0.2
_SLACK = 4  # requests more than the least busy scorer before affinity gives way to load,
_MOST_LOAD = 1.25  # and times the mean load, where that is more
_log = logging.getLogger(__name__)
_T = TypeVar("_T")


class ScorerPool:
    """Follows `targets`, watches the scorers there and chooses among them.

    `check` raises `ConfigError` for a scorer whose info does not fit this gateway; such a scorer
    is never used, and it fails the start.
    """

    def __init__(
        self,
        targets: Targets,
        check: Callable[[scorer_pb2.GetScorerInfoResponse], None],
        tls: TlsFiles | None = None,
    ) -> None:
        self._targets = targets
        self._tls = tls
        self._check = check
        self._changed = asyncio.Event()
        self._scorers: dict[Target, Scorer] = {}
        self._watches: dict[Target, asyncio.Task[None]] = {}
        self._tasks = Background()
        self._last_info = scorer_pb2.GetScorerInfoResponse()  # while nobody is known
        self._misfits: dict[str, ConfigError] = {}

    def follow(self) -> None:
        """Begin to watch the scorers."""
        self._tasks.start(self._follow())

    async def start(self, timeout_s: float) -> None:
        """Return once a scorer serves.

        Raises `ConfigError` if one does not fit, or if none serves within `timeout_s`.
        """
        self.follow()
        try:
            async with asyncio.timeout(timeout_s):
                while not self.serving and not self._misfits:
                    await self._changed.wait()
        except TimeoutError as error:
            targets = ", ".join(scorer.target for scorer in self.scorers)
            raise ConfigError(
                f"no scorer served within {timeout_s:g} s at {targets or 'any address'}: "
                "is one running there, and is the address right?"
            ) from error
        if self._misfits:
            raise next(iter(self._misfits.values()))

    async def stop(self) -> None:
        await self._tasks.cancel()
        await asyncio.gather(*(scorer.close() for scorer in self.scorers))

    @property
    def scorers(self) -> tuple[Scorer, ...]:
        return tuple(self._scorers.values())

    @property
    def serving(self) -> tuple[Scorer, ...]:
        return tuple(scorer for scorer in self.scorers if scorer.serving)

    @property
    def max_model_len(self) -> int:
        """Tokens that a request can reach on every scorer known so far."""
        known = [s.info.max_model_len for s in self.scorers if s.info.max_model_len]
        return min(known, default=self._last_info.max_model_len)

    @property
    def vocab_size(self) -> int:
        known = [s.info.vocab_size for s in self.scorers if s.info.vocab_size]
        return min(known, default=self._last_info.vocab_size)

    @property
    def adapters(self) -> tuple[str, ...]:
        known = [s.info for s in self.scorers if s.info.vocab_size] or [self._last_info]
        first, *others = [info.adapters for info in known]
        return tuple(name for name in first if all(name in other for other in others))

    async def known(self, timeout_s: float) -> None:
        """Wait at most `timeout_s` until a scorer has told its sizes.

        Raises `UnavailableError`.
        """
        await self._until(lambda: self.max_model_len, timeout_s)

    async def pick(
        self,
        affinity: bytes,
        excluded: frozenset[Scorer],
        timeout_s: float,
    ) -> Scorer:
        """Choose the scorer for a request, waiting at most `timeout_s` until one serves.

        Requests of the same `affinity` go to one scorer, by rendezvous hashing, so that one that
        comes or goes moves no more than its share. While that one's load is above the bound, the
        least busy one is taken (as in consistent hashing with bounded loads, Mirrokni et al. 2016).
        Raises `UnavailableError`.
        """
        candidates = await self._until(lambda: set(self.serving) - excluded, timeout_s)
        home = min(candidates, key=lambda scorer: _rendezvous(scorer.target, affinity))
        least_busy = min(candidates, key=lambda scorer: scorer.in_flight)
        mean = sum(scorer.in_flight for scorer in candidates) / len(candidates)
        most = max(least_busy.in_flight + _SLACK, _MOST_LOAD * mean)
        return home if home.in_flight <= most else least_busy

    async def _until(self, condition: Callable[[], _T], timeout_s: float) -> _T:
        """Return what `condition` says once it is truthy. Raises `UnavailableError`."""
        try:
            async with asyncio.timeout(timeout_s):
                while not (found := condition()):
                    await self._changed.wait()
        except TimeoutError as error:
            raise UnavailableError("No scorer can be reached. Try again soon.") from error
        return found

    def mark_down(self, scorer: Scorer) -> None:
        """Send no requests to a scorer that one could not reach, until a probe succeeds."""
        self._set_serving(scorer, False)

    async def _follow(self) -> None:
        async for targets in self._targets.follow():
            for target in self._watches.keys() - set(targets):
                self._drop(target)
            for target in targets:
                if target not in self._watches:
                    self._watches[target] = self._tasks.start(self._watch(target))

    def _drop(self, target: Target) -> None:
        """No new requests to a scorer whose name is gone; those under way end there."""
        _log.info("scorer %s is not listed any more", target)
        self._watches.pop(target).cancel()
        self._misfits.pop(target.address, None)
        scorer = self._scorers.pop(target, None)
        if scorer is None:  # it could not be dialled yet
            return
        self._set_serving(scorer, False)
        self._tasks.start(scorer.close(CLOSE_GRACE_S))

    async def _watch(self, target: Target) -> None:
        scorer = self._scorers[target] = await self._dial(target)
        while True:
            healthy = await scorer.probe()
            if healthy and not scorer.serving:  # new or restarted: maybe another model
                healthy = await self._admit(scorer)
            elif healthy:
                await scorer.refresh_load()
            self._set_serving(scorer, healthy)
            await asyncio.sleep(_PROBE_UP_S if healthy else _PROBE_DOWN_S)

    async def _dial(self, target: Target) -> Scorer:
        """Try until the TLS files can be read: they may be in the middle of being replaced."""
        while True:
            try:
                scorer = Scorer(target, self._tls)
            except ConfigError as error:
                self._refuse(target.address, "cannot be dialled", error)
            else:
                self._misfits.pop(target.address, None)
                return scorer
            await asyncio.sleep(_PROBE_DOWN_S)

    async def _admit(self, scorer: Scorer) -> bool:
        try:
            info = await scorer.fetch_info()
            self._check(info)
        except ConfigError as error:
            scorer.info = scorer_pb2.GetScorerInfoResponse()
            self._refuse(scorer.target, "does not fit", error)
            return False
        except OutriderError as error:
            _log.warning("scorer %s gives no information: %s", scorer.target, error.message)
            return False
        self._misfits.pop(scorer.target, None)
        scorer.info = self._last_info = info
        return True

    def _refuse(self, address: str, why: str, error: ConfigError) -> None:
        if address not in self._misfits:
            _log.error("scorer %s %s: %s", address, why, error.message)
        self._misfits[address] = error
        self._notify()

    def _set_serving(self, scorer: Scorer, serving: bool) -> None:
        if scorer.serving == serving:
            return
        _log.info("scorer %s is %s", scorer.target, "serving" if serving else "not serving")
        scorer.serving = serving
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    @property
    def changed(self) -> asyncio.Event:
        """Set at the next change of who serves; then another event takes its place."""
        return self._changed


def _rendezvous(target: str, affinity: bytes) -> bytes:
    return hashlib.blake2b(target.encode() + b"\0" + affinity, digest_size=8).digest()
