"""The proposer's stream to one scorer: dialled, kept up, dialled again."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import random
from collections import deque
from collections.abc import Callable
from typing import Any, Final

import grpc

from outrider.errors import (
    CapacityError,
    ConfigError,
    InternalError,
    InvalidRequestError,
    OutriderError,
    ProposerRefusedError,
    UnavailableError,
)
from outrider.rpc.channel import open_channel
from outrider.rpc.deployment import TlsFiles
from outrider.rpc.status import from_rpc_error
from outrider.rpc.targets import Target
from outrider.rpc.versions import PROTOCOL_VERSION, agreed_version
from outrider.v1 import draft_pb2, proposer_pb2, scorer_pb2_grpc
from proposer_service.config import LinkConfig
from proposer_service.metrics import ProposerMetrics
from proposer_service.shared_rows import SharedRows
from proposer_service.worker import DraftWorker

_log = logging.getLogger(__name__)

_QUEUE_FULL_WAIT_S: Final = 0.002
_CHUNK_BYTES: Final = 2**20  # of a projection
_STEADY_S: Final = 5.0  # a stream that lived this long starts the backoff afresh
_link_ids = itertools.count(1)

Call = grpc.aio.StreamStreamCall[Any, Any]


class ScorerLink:
    """Keeps one Draft stream to `target` from `run` until `drain` or cancellation.

    `hello` makes a Hello with a new incarnation.
    """

    def __init__(
        self,
        target: Target,
        hello: Callable[[], draft_pb2.Hello],
        worker: DraftWorker,
        config: LinkConfig,
        metrics: ProposerMetrics,
        tls: TlsFiles | None = None,
    ) -> None:
        self.target = target
        self._tls = tls
        self._hello = hello
        self._worker = worker
        self._config = config
        self._metrics = metrics
        self._stream: _Stream | None = None
        self._draining = False
        self._hurry = asyncio.Event()  # do not wait to dial again: it is over
        self._last_error: OutriderError | None = UnavailableError("not connected yet")

    def status(self) -> proposer_pb2.ScorerLink:
        """For GetProposerInfo."""
        stream, error = self._stream, self._last_error
        return proposer_pb2.ScorerLink(
            target=self.target.address,
            connected=stream is not None,
            sessions=0 if stream is None else stream.num_sessions,
            last_error="" if error is None else error.message,
            refused=_is_refusal(error),
        )

    async def run(self) -> None:
        """Dials until drained or cancelled; raises nothing."""
        config, loop = self._config, asyncio.get_running_loop()
        backoff = config.backoff_first_s
        while not self._draining:
            started = loop.time()
            error = await self._dial()
            if self._draining:
                return
            if loop.time() - started > _STEADY_S:
                backoff = config.backoff_first_s
            self._tell(error)
            wait = backoff
            if _is_refusal(error):
                wait = max(wait, config.refused_retry_s)
            elif isinstance(error, CapacityError):
                wait = max(wait, error.retry_after_s)
            # Jitter: many proposers see a scorer die at the same moment.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait * random.uniform(0.5, 1.0)):
                    await self._hurry.wait()
            backoff = min(2 * backoff, config.backoff_max_s)

    async def drain(self, grace_s: float) -> None:
        """Says Goodbye and waits at most `grace_s` for the scorer to close its sessions."""
        self._end_dialling()
        if self._stream is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace_s):
                    await self._stream.say_goodbye()

    async def retire(self, grace_s: float) -> None:
        """Lets the stream's sessions end by themselves, then says Goodbye; dials no more."""
        self._end_dialling()
        if self._stream is not None:
            await self._stream.until_unused()
            await self.drain(grace_s)

    def _end_dialling(self) -> None:
        self._draining = True
        self._hurry.set()

    def _tell(self, error: OutriderError) -> None:
        """Logs what is news: not every failed dial of a scorer that is away."""
        if self._last_error is None or error.message != self._last_error.message:
            refused = _is_refusal(error)
            verb = "refused this proposer" if refused else "is not connected"
            level = logging.ERROR if refused else logging.WARNING
            _log.log(level, "scorer %s %s: %s (%s)", self.target, verb, error.message, error.reason)
        self._last_error = error

    async def _dial(self) -> OutriderError:
        """One stream from Hello to its end; returns why it ended."""
        try:
            # A channel per dial: none of gRPC's own backoff is left over from the last one, and
            # certificates that were replaced are read.
            dialled = open_channel(self.target, self._tls)
        except ConfigError as error:
            return error
        async with dialled as channel:
            call: Call = scorer_pb2_grpc.ScorerServiceStub(channel).Draft()
            try:
                await self._converse(call)
            except TimeoutError:
                return UnavailableError("the scorer does not answer")
            except grpc.aio.AioRpcError as error:
                return from_rpc_error(error)
            except OutriderError as error:
                return error
            except Exception:  # a bug: no reason to leave the scorer for ever
                _log.exception("the stream to scorer %s failed", self.target)
                return InternalError("the stream failed; the log has the details")
            finally:
                call.cancel()
        return UnavailableError("the scorer ended the stream")

    async def _converse(self, call: Call) -> None:
        hello = self._hello()
        with contextlib.closing(SharedRows(self.target, hello)) as rows:
            async with asyncio.timeout(self._config.answer_timeout_s):
                await _write(call, draft_pb2.DraftRequest(hello=hello))
                welcome = await self._read_welcome(call)
            rows.welcomed(welcome)
            if welcome.wants_projection:
                await self._send_projection(call)
            await self._serve(call, welcome, rows)

    async def _read_welcome(self, call: Call) -> draft_pb2.Welcome:
        message: Any = await call.read()
        if message is grpc.aio.EOF or not message.HasField("welcome"):
            raise UnavailableError("the scorer did not answer Hello with Welcome")
        welcome: draft_pb2.Welcome = message.welcome
        if welcome.protocol_version != agreed_version(welcome.protocol_version):
            raise ProposerRefusedError(
                f"the scorer goes on in version {welcome.protocol_version} of the Draft protocol, "
                f"which is newer than ours ({PROTOCOL_VERSION})",
                reason="PROTOCOL_VERSION",
            )
        return welcome

    async def _send_projection(self, call: Call) -> None:
        matrix = self._worker.projection
        for start in range(0, len(matrix), _CHUNK_BYTES):
            chunk = draft_pb2.ProjectionChunk(
                offset=start, data=matrix[start : start + _CHUNK_BYTES]
            )
            async with asyncio.timeout(self._config.answer_timeout_s):
                await _write(call, draft_pb2.DraftRequest(projection=chunk))

    async def _serve(self, call: Call, welcome: draft_pb2.Welcome, rows: SharedRows) -> None:
        link = next(_link_ids)
        stream = _Stream(call, self._config)
        self._worker.attach(link, stream.put, welcome.max_block_tokens)
        writing = asyncio.create_task(stream.write_all())
        self._stream, self._last_error = stream, None
        self._metrics.links.inc()
        _log.info("scorer %s connected", self.target)
        try:
            reading = asyncio.create_task(self._read_all(link, stream, rows))
            try:
                await asyncio.wait([reading, writing], return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in (reading, writing):
                    task.cancel()
                results = await asyncio.gather(reading, writing, return_exceptions=True)
            for result in results:
                if isinstance(result, Exception):
                    raise result
        finally:
            self._stream = None
            self._metrics.links.dec()
            self._worker.detach(link)
            stream.ended.set()

    async def _read_all(self, link: int, stream: _Stream, shared: SharedRows) -> None:
        message: Any
        while (message := await stream.call.read()) is not grpc.aio.EOF:
            if message.HasField("sessions"):
                stream.note(message.sessions)
                rows = shared.of(message.sessions)
                # A full queue holds back the reader, and gRPC's flow control the scorer.
                while not self._worker.post(link, message.sessions, rows):  # noqa: ASYNC110
                    await asyncio.sleep(_QUEUE_FULL_WAIT_S)


class _Stream:
    """An established stream: what waits to be written, and which sessions are open on it."""

    def __init__(self, call: Call, config: LinkConfig) -> None:
        self.call = call
        self.ended = asyncio.Event()
        self._config = config
        self._unsent: deque[draft_pb2.DraftRequest | None] = deque()  # None: nothing follows
        self._wake = asyncio.Event()
        self._open: dict[int, int] = {}  # session -> epoch
        self._all_closed = asyncio.Event()
        self._all_closed.set()

    @property
    def num_sessions(self) -> int:
        return len(self._open)

    def put(self, messages: list[draft_pb2.DraftRequest]) -> None:
        """Queues messages; called on the loop."""
        self._unsent.extend(messages)
        self._wake.set()

    async def write_all(self) -> None:
        """Writes what is put, until cancelled. Raises for a scorer that does not read."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._unsent:
                if len(self._unsent) > self._config.max_unsent:
                    raise UnavailableError("the scorer does not read its blocks")
                message = self._unsent.popleft()
                if message is None:
                    await self.call.done_writing()
                    continue
                async with asyncio.timeout(self._config.answer_timeout_s):
                    await _write(self.call, message)

    def note(self, batch: draft_pb2.SessionBatch) -> None:
        """Keeps count of open sessions."""
        for opened in batch.opens:
            self._open[opened.session] = opened.epoch
        for closed in batch.closes:
            if self._open.get(closed.session) == closed.epoch:
                del self._open[closed.session]
        if self._open:
            self._all_closed.clear()
        else:
            self._all_closed.set()

    async def until_unused(self) -> None:
        """Returns when no session is open, or the stream has ended."""
        closed = asyncio.create_task(self._all_closed.wait())
        ended = asyncio.create_task(self.ended.wait())
        try:
            await asyncio.wait([closed, ended], return_when=asyncio.FIRST_COMPLETED)
        finally:
            closed.cancel()
            ended.cancel()

    async def say_goodbye(self) -> None:
        """Returns when every session was closed and the scorer has ended the stream."""
        self.put([draft_pb2.DraftRequest(goodbye=draft_pb2.Goodbye())])
        await self.until_unused()
        self._unsent.append(None)
        self._wake.set()
        await self.ended.wait()


def _is_refusal(error: OutriderError | None) -> bool:
    return isinstance(error, ProposerRefusedError | InvalidRequestError)


async def _write(call: Call, message: draft_pb2.DraftRequest) -> None:
    try:
        await call.write(message)
    except asyncio.InvalidStateError as error:  # ended meanwhile: the status says why
        if await call.code() is grpc.StatusCode.OK:
            raise UnavailableError("the scorer ended the stream") from error
        await call.read()  # raises the status
        raise UnavailableError("the stream broke") from error
