"""A data connection to a scorer, which the drafting thread reads and writes itself.

Between a commit, its draft and the draft's way back, no other thread has to wake up and get the
interpreter's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from google.protobuf.message import DecodeError

from outrider.errors import InvalidRequestError, OutriderError
from outrider.rpc.frames import FrameSocket
from outrider.v1 import draft_pb2

_parse = draft_pb2.DraftResponse.FromString


class Connection:
    """A data connection. Made on the event loop, then used on the drafting thread.

    There it calls `on_failure` once, and `on_sessions` with messages that open or close sessions.
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
        return self._frames.fileno()

    @property
    def has_unsent(self) -> bool:
        """Return whether to call `flush` when the socket can be written."""
        return self._frames.has_unsent

    def receive(self) -> list[draft_pb2.SessionBatch]:
        """Return all messages about sessions that have come; none if the connection failed."""
        received: list[draft_pb2.SessionBatch] = []
        try:
            for data in self._frames.receive():
                message = _parse(data)
                if message.HasField("sessions"):
                    batch = message.sessions
                    received.append(batch)
                    if batch.opens or batch.closes:
                        self._on_sessions(batch)
        except DecodeError:
            self._fail(InvalidRequestError("the scorer sent what is no DraftResponse"))
        except OutriderError as error:
            self._fail(error)
        return received

    def send(self, messages: Sequence[draft_pb2.DraftRequest]) -> None:
        """Send what the socket takes now; the rest waits for `flush`."""
        try:
            if not self.failed:
                self._frames.send([message.SerializeToString() for message in messages])
        except OutriderError as error:
            self._fail(error)

    def flush(self) -> None:
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
