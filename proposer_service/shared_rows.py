"""Where the rows of hidden states of a stream come from: its messages, or a ring beside them."""

from __future__ import annotations

import logging
from pathlib import Path

from outrider.rpc.row_ring import RingReader
from outrider.rpc.targets import Target
from outrider.v1 import draft_pb2

_log = logging.getLogger(__name__)


class SharedRows:
    """The ring that the Hello of one stream offers, as long as the scorer may use it."""

    def __init__(self, target: Target, hello: draft_pb2.Hello) -> None:
        """Put the offer into `hello`, if it asks for rows from a scorer on the same host."""
        self._target = target
        self._ring: RingReader | None = None
        if target.socket_path is None or not hello.HasField("features"):
            return
        try:
            self._ring = RingReader(Path(target.socket_path).parent)
        except OSError as error:
            _log.warning("no memory can be shared with scorer %s: %s", target, error)
        else:
            hello.row_ring.CopyFrom(self._ring.offer)

    def welcomed(self, welcome: draft_pb2.Welcome) -> None:
        """The scorer has said whether it uses the ring."""
        if self._ring is None:
            return
        self._ring.unlink()
        if not welcome.uses_row_ring:
            _log.info("scorer %s shares no memory: hidden states come by message", self._target)
            self.close()

    def of(self, batch: draft_pb2.SessionBatch) -> list[bytes]:
        """Those of each of the batch's features. Raises `UnavailableError` if they are gone."""
        if self._ring is not None and batch.HasField("rows_at"):
            return self._ring.read(batch.rows_at, [each.num_bytes for each in batch.features])
        return [each.rows for each in batch.features]

    def close(self) -> None:
        """Forgets the ring."""
        if self._ring is not None:
            self._ring.close()
            self._ring = None
