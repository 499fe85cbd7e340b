"""The streams to all scorers that `--scorer` currently stands for."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from outrider.rpc.targets import Target, Targets
from outrider.rpc.tasks import Background
from outrider.v1 import proposer_pb2
from proposer_service.link import ScorerLink

_log = logging.getLogger(__name__)


class ScorerLinks:
    """Links to the listed targets. `new_link` makes a link that does not dial yet."""

    def __init__(
        self, targets: Targets, new_link: Callable[[Target], ScorerLink], drain_grace_s: float
    ) -> None:
        self._targets = targets
        self._new_link = new_link
        self._drain_grace_s = drain_grace_s
        self._links: dict[Target, ScorerLink] = {}
        self._tasks = Background()

    def status(self) -> list[proposer_pb2.ScorerLink]:
        """Return the state of the links to listed scorers."""
        return [link.status() for link in self._links.values()]

    async def run(self) -> None:
        """Follow the targets until cancelled, or until all are dialled if they cannot change."""
        async for targets in self._targets.follow():
            for target in self._links.keys() - set(targets):
                _log.info("scorer %s is not listed any more", target)
                self._tasks.start(self._links.pop(target).retire(self._drain_grace_s))
            for target in targets:
                if target not in self._links:
                    self._links[target] = link = self._new_link(target)
                    self._tasks.start(link.run())

    async def stop(self) -> None:
        """Drain and end all links."""
        await asyncio.gather(*(link.drain(self._drain_grace_s) for link in self._links.values()))
        await self._tasks.cancel()
