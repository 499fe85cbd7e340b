"""GenerateSteps: all requests of one gateway over one stream, a message per engine step."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final

from outrider.errors import CapacityError, DeadlineError, InvalidRequestError, OutriderError
from outrider.rpc import codec, status
from outrider.rpc.decoding import Unreadable
from outrider.rpc.tasks import first_of
from outrider.rpc.telemetry import Telemetry
from outrider.types import PLAIN, Commit
from outrider.v1 import scorer_pb2
from scorer_service.call import Call, Serving
from scorer_service.hub import Hub
from scorer_service.mailbox import Mailbox
from scorer_service.sessions import Session
from scorer_service.token_columns import TokenColumns

StepsRequests = AsyncIterator[scorer_pb2.GenerateStepsRequest | Unreadable]
Write = Callable[[scorer_pb2.GenerateStepsResponse], Awaitable[None]]

_HEARTBEAT_S: Final = 0.5
_MAX_REQUESTS: Final = 16_384
"""Requests of a stream at once; what the engine takes is much less."""
_MAX_UNWRITTEN: Final = 2 * _MAX_REQUESTS
"""While so many requests wait to be written, refused ones included, nothing is read."""
_MESSAGE_BYTES: Final = 2**20
"""Approximate size of a message. Further requests wait for the next message."""
_TOKEN_BYTES: Final = 5
_MAX_COMMITS: Final = 256  # of a request in a message


class _Row:
    """A request of the stream."""

    __slots__ = (
        *("call", "columns", "ended", "error", "id", "mailbox", "queue", "queued", "session"),
        *("task", "timer", "wake"),
    )

    def __init__(
        self,
        row_id: int,
        call: Call | None,
        queue: deque[_Row],
        columns: TokenColumns,
        wake: Callable[[], object],
    ) -> None:
        self.id = row_id
        self.call = call  # None: refused
        self.queue = queue  # of rows with something to write,
        self.columns = columns  # those whose token is in no mailbox,
        self.wake = wake  # and who writes it
        self.session: Session | None = None  # None: not with the engine
        self.mailbox: Mailbox | None = None  # None: not with the engine, or nothing is wanted of it
        self.error: OutriderError | None = None
        self.queued = False
        self.ended = call is None
        self.task: asyncio.Task[None] | None = None  # of its admission
        self.timer: asyncio.TimerHandle | None = None

    def ready(self) -> None:
        """Note that there is something to write."""
        if not self.queued:
            self.queued = True
            if not (self.queue or self.columns.ids):
                self.wake()
            self.queue.append(self)
            if self.session is not None:
                self.columns.leave(self.session.id)

    def written(self) -> None:
        """Let the next token come in columns, if nothing is to be written before it."""
        session = self.session
        if session is not None and session.rounds is None and not (self.queued or self.ended):
            self.columns.join(session.id, self.id)

    def end(self, error: BaseException | None = None) -> None:
        """Abort what still runs. What the mailbox holds may still be taken."""
        if self.ended:
            return
        self.ended = True
        if self.task is not None:
            self.task.cancel()
        if self.timer is not None:
            self.timer.cancel()
        if self.mailbox is not None:
            self.mailbox.on_ready = None
        if self.session is not None:
            self.columns.leave(self.session.id)
        assert self.call is not None
        self.call.end(error)

    def fail(self, error: OutriderError) -> None:
        """End with an error, after the tokens that are there."""
        self.end(error)
        self.error = error
        self.ready()


class StepsStream:
    """One stream. `ready` returns what serves, or raises."""

    def __init__(self, telemetry: Telemetry, ready: Callable[[], Serving]) -> None:
        self._telemetry = telemetry
        self._ready = ready
        self._hub: Hub | None = None  # None: no request came
        self._rows: dict[int, _Row] = {}  # whose end was not written
        self._last_id = -1
        self._queue: deque[_Row] = deque()
        self._wake = asyncio.Event()
        self._columns = TokenColumns(self._wake_later)
        self._written = asyncio.Event()
        self._finishing = False
        self._written_at = asyncio.get_running_loop().time()

    def finish(self) -> None:
        """End the stream as soon as it has no requests."""
        self._finishing = True
        self._wake.set()

    async def serve(self, requests: StepsRequests, write: Write) -> None:
        """Answer until either side ends the stream.

        Raises `InvalidRequestError` after a message that does not parse.
        """
        try:
            await first_of(self._read(requests), self._write(write), self._beat())
        finally:
            for row in self._rows.values():
                row.end(asyncio.CancelledError())
            self._rows.clear()
            if self._hub is not None:
                self._hub.columns.remove(self._columns)

    async def _read(self, requests: StepsRequests) -> None:
        async for message in requests:
            if isinstance(message, Unreadable):
                raise message.error
            for row_id in message.cancelled_ids:
                row = self._rows.pop(row_id, None)
                if row is not None:
                    row.end(asyncio.CancelledError())
                    row.mailbox = row.error = None
                    self._columns.drop(row_id)
            if message.HasField("begin"):
                self._begin(message.begin)
            while len(self._queue) >= _MAX_UNWRITTEN:
                self._written.clear()
                await self._written.wait()

    def _begin(self, begin: scorer_pb2.StepsCall) -> None:
        refusal: OutriderError | None = None
        if begin.id <= self._last_id:
            refusal = InvalidRequestError("id must be above all ids before it.", param="id")
        elif len(self._rows) >= _MAX_REQUESTS:
            refusal = CapacityError("Too many requests on one stream.")
        if refusal is not None:
            row = self._rows.get(begin.id) or self._row(begin.id, None)
            row.fail(refusal)
            return
        self._last_id = begin.id
        metadata = tuple(begin.metadata.items())
        call = Call(self._telemetry, begin.request, metadata)
        row = self._rows[begin.id] = self._row(begin.id, call)
        loop = asyncio.get_running_loop()
        if begin.HasField("timeout_ms"):
            error = DeadlineError("the request's deadline passed")
            row.timer = loop.call_later(begin.timeout_ms / 1e3, row.fail, error)
        row.task = loop.create_task(self._admit(row, call))

    async def _admit(self, row: _Row, call: Call) -> None:
        try:
            session = await call.submit(self._serving)
        except Exception as error:
            row.fail(status.outrider_error(error))
            return
        row.session, row.mailbox = session, session.mailbox
        row.mailbox.on_ready = row.ready
        row.written()

    def _serving(self) -> Serving:
        serving = self._ready()
        if self._hub is None:
            self._hub = serving.hub
            self._hub.columns.append(self._columns)
        return serving

    def _row(self, row_id: int, call: Call | None) -> _Row:
        return _Row(row_id, call, self._queue, self._columns, self._wake_later)

    def _wake_later(self) -> None:
        """Write later than those whom the same step has woken: proposers come first."""
        asyncio.get_running_loop().call_soon(self._wake.set)

    async def _write(self, write: Write) -> None:
        now = asyncio.get_running_loop().time
        while self._rows or not self._finishing:
            await self._wake.wait()
            self._wake.clear()
            message = self._message()
            self._written.set()
            await write(message)
            self._written_at = now()

    async def _beat(self) -> None:
        """Have a message written after a silence; a timeout for each message would cost more."""
        now = asyncio.get_running_loop().time
        while True:
            silent_s = now() - self._written_at
            if silent_s >= _HEARTBEAT_S:
                self._wake.set()
                silent_s = 0.0
            await asyncio.sleep(_HEARTBEAT_S - silent_s)

    def _message(self) -> scorer_pb2.GenerateStepsResponse:
        """Return the next message, of about `_MESSAGE_BYTES` at most."""
        ids, token_ids = self._columns.take()
        singles = frozenset(ids if self._queue else ())
        counts = [1] * len(ids)
        kinds = [codec.kinds_to_bytes(PLAIN) * len(ids)]
        details: list[scorer_pb2.StepsDetails] = []
        room = _MESSAGE_BYTES - len(ids) * _TOKEN_BYTES
        for _ in range(len(self._queue)):
            row = self._queue.popleft()
            if row.id in singles:  # a message has a row once
                self._queue.append(row)
                continue
            row.queued = False
            count = 0
            commits = () if row.mailbox is None else row.mailbox.take_some(_MAX_COMMITS)
            for commit in commits:
                token_ids += commit.token_ids
                count += len(commit.token_ids)
                kinds.append(codec.kinds_to_bytes(commit.kinds))
            if count:
                ids.append(row.id)
                counts.append(count)
                room -= count * _TOKEN_BYTES
            about = self._details(row, commits)
            if about is not None:
                details.append(about)
                room -= about.ByteSize()
            row.written()
            if room <= 0:
                break
        if self._queue:
            self._wake.set()
        return scorer_pb2.GenerateStepsResponse(
            ids=ids, counts=counts, token_ids=token_ids, kinds=b"".join(kinds), details=details
        )

    def _details(
        self, row: _Row, commits: list[Commit] | tuple[()]
    ) -> scorer_pb2.StepsDetails | None:
        """Return the details beside tokens, and forget a request that ends here."""
        mailbox, response, error = row.mailbox, None, row.error
        if commits:
            assert row.call is not None
            last = commits[-1]
            told = last.stats or last.finish_reason or last.logprobs or commits[0].prompt_logprobs
            if told or (row.call.tells_drafts and any(commit.draft for commit in commits)):
                response = row.call.details(commits)
            elif row.call.first_token_s is None:
                row.call.note_tokens(commits)
            if last.finish_reason is not None:
                self._forget(row)
                return scorer_pb2.StepsDetails(id=row.id, response=response)
        if mailbox is not None:
            if len(commits) == _MAX_COMMITS and mailbox.holds_commits:
                row.ready()
                error = None
            elif mailbox.error is not None and error is None:
                error = status.outrider_error(mailbox.error)
        if error is None:
            return (
                None if response is None else scorer_pb2.StepsDetails(id=row.id, response=response)
            )
        self._forget(row, error)
        return scorer_pb2.StepsDetails(
            id=row.id, response=response, status=status.to_status(error).SerializeToString()
        )

    def _forget(self, row: _Row, error: OutriderError | None = None) -> None:
        row.end(error)
        if self._rows.get(row.id) is row:
            del self._rows[row.id]
