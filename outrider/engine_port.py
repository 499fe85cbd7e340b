"""The contract between a scorer and an engine: requests in, tokens out. It imports no engine."""

from __future__ import annotations

from typing import Any, Protocol

from outrider.draft_port import DraftingEngine
from outrider.types import EngineInfo, EngineSnapshot, Request


class ServedEngine(DraftingEngine, Protocol):
    """An engine as the scorer's event loop sees it. No method but `start` and `stop` waits.

    Committed tokens, endings and failures come as `StepEvents`, through the callable that the
    engine was made with.
    """

    @property
    def running(self) -> bool:
        """False once the engine is to stop, or has broken down."""

    def start(self, timeout_s: float) -> EngineInfo:
        """Load the model, on a thread that may wait. Raises `OutriderError`s."""

    def stop(self, timeout_s: float) -> None:
        """End the engine, on a thread that may wait; open sessions fail with `UnavailableError`.

        Raises `DeadlineError` if it takes longer than `timeout_s`.
        """

    def submit(self, request: Request, constraint: Any = None) -> None:
        """Queue a request; `constraint` is its compiled one, if the engine wants it compiled.

        Raises `InvalidRequestError`, `PromptTooLongError`, `CapacityError` when the queue is
        full, or `UnavailableError`.
        """

    def abort(self, session_id: int) -> None:
        """End a session without a further event. Unknown sessions are ignored."""

    def snapshot(self) -> EngineSnapshot:
        """Return how full the engine was after its last step."""

    async def until_hung(self) -> None:
        """Return when the engine is dead or hangs; it counts as broken down then."""
