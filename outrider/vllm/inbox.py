"""Messages from the event loop to the stepping thread."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import NamedTuple

from outrider.draft_port import MAX_BLOCKS_AT_ONCE, ColocatedEngine, DraftOffer, PostedBlock

Work = Callable[[ColocatedEngine], None]


class Messages(NamedTuple):
    """Holds what came since the last step, in order."""

    offers: Iterable[tuple[int, DraftOffer]]  # by session
    works: Iterable[tuple[int | None, Work]]  # likewise; None: of no session
    blocks: dict[int, list[PostedBlock]]


class Inbox:
    """Messages that no step has taken yet. Thread-safe."""

    def __init__(self) -> None:
        self._wakeup = threading.Condition()
        # Under the condition's lock:
        self._offers: deque[tuple[int, DraftOffer]] = deque()
        self._works: deque[tuple[int | None, Work]] = deque()
        self._blocks: dict[int, list[PostedBlock]] = {}

    def between_same_steps(self) -> AbstractContextManager[object]:
        return self._wakeup  # its lock may be taken again

    def set_drafting(self, session_id: int, offer: DraftOffer) -> None:
        with self._wakeup:
            self._offers.append((session_id, offer))
            self._wakeup.notify()

    def run_between_steps(self, work: Work, session_id: int | None = None) -> None:
        """Run `work` on the stepping thread; drop it if the session has ended by then."""
        with self._wakeup:
            self._works.append((session_id, work))

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

    def take(self, timeout_s: float = 0.0) -> Messages:
        """Return what came; wait so long for offers and blocks."""
        with self._wakeup:
            if timeout_s > 0.0 and not (self._offers or self._blocks):
                self._wakeup.wait(timeout_s)
            messages = Messages(self._offers, self._works, self._blocks)
            self._offers, self._works, self._blocks = deque(), deque(), {}
        return messages
