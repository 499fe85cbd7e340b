"""A data connection to a scorer, which the drafting thread reads and writes itself.

No other thread has to be woken, and given the interpreter's lock, between a scorer's commit and the
draft after it, or between a draft and its way to the scorer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from google.protobuf.message import DecodeError

from outrider.errors import InvalidRequestError, OutriderError
from outrider.rpc.frames import FrameSocket
from outrider.v1 import draft_pb2

Received = tuple[draft_pb2.SessionBatch, list[bytes]]
"""What a scorer sent, and the rows of each of its features."""

_parse = draft_pb2.DraftResponse.FromString


class Connection:
    """Made on the event loop; then all of it happens on the drafting thread.

    `on_failure` is called there, once, and `on_sessions` with what opens or closes sessions.
    """

    def __init__(
        self,
        frames: FrameSocket,
        on_sessions: Callable[[draft_pb2.SessionBatch], None],
        on_failure: Callable[[OutriderError], None],
    ) -> None:
        self._frames = frames
        self._on_sessions = on_sessions
        self._on_failure = on_failure
        self.failed = False

    def fileno(self) -> int:
        """For a selector."""
        return self._frames.fileno()

    @property
    def has_unsent(self) -> bool:
        """Whether `flush` is to be called when the socket can be written."""
        return self._frames.has_unsent

    def receive(self) -> list[Received]:
        """All that has come; nothing if that is the connection's end, or no message."""
        received: list[Received] = []
        try:
            for data in self._frames.receive():
                message = _parse(data)
                if message.HasField("sessions"):
                    batch = message.sessions
                    received.append((batch, [each.rows for each in batch.features]))
                    if batch.opens or batch.closes:
                        self._on_sessions(batch)
        except DecodeError:
            self._fail(InvalidRequestError("the scorer sent what is no DraftResponse"))
        except OutriderError as error:
            self._fail(error)
        return received

    def send(self, messages: Sequence[draft_pb2.DraftRequest]) -> None:
        """What the socket does not take now waits for `flush`."""
        try:
            if not self.failed:
                self._frames.send([message.SerializeToString() for message in messages])
        except OutriderError as error:
            self._fail(error)

    def flush(self) -> None:
        """Send what waits, as far as the socket takes it."""
        try:
            self._frames.flush()
        except OutriderError as error:
            self._fail(error)

    def close(self) -> None:
        self._frames.close()

    def _fail(self, error: OutriderError) -> None:
        if not self.failed:
            self.failed = True
            self._on_failure(error)
