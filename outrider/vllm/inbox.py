"""Messages from the event loop to the stepping thread."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from contextlib import AbstractContextManager

from outrider.draft_port import MAX_BLOCKS_AT_ONCE, DraftOffer, PostedBlock


class Inbox:
    """Offers and blocks that no step has taken yet. Thread-safe."""

    def __init__(self) -> None:
        self._wakeup = threading.Condition()
        # Under the condition's lock:
        self._offers: deque[tuple[int, DraftOffer]] = deque()
        self._blocks: dict[int, list[PostedBlock]] = {}

    def between_same_steps(self) -> AbstractContextManager[object]:
        return self._wakeup  # its lock may be taken again

    def set_drafting(self, session_id: int, offer: DraftOffer) -> None:
        with self._wakeup:
            self._offers.append((session_id, offer))
            self._wakeup.notify()

    def post_blocks(self, blocks: Iterable[PostedBlock]) -> None:
        with self._wakeup:
            waiting = self._blocks
            for block in blocks:
                if (queue := waiting.get(block.session_id)) is None:
                    waiting[block.session_id] = [block]
                else:
                    queue.append(block)
                    del queue[:-MAX_BLOCKS_AT_ONCE]
            self._wakeup.notify()

    def take(
        self, timeout_s: float = 0.0
    ) -> tuple[Iterable[tuple[int, DraftOffer]], dict[int, list[PostedBlock]]]:
        """Return what came, offers by session and blocks by session; wait for it so long."""
        with self._wakeup:
            if timeout_s > 0.0 and not (self._offers or self._blocks):
                self._wakeup.wait(timeout_s)
            offers, self._offers = self._offers, deque()
            blocks, self._blocks = self._blocks, {}
        return offers, blocks
