"""Keeps the proposer's streams to its scorers: dials, serves, and dials again."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import random
from collections.abc import Callable
from concurrent.futures import Future
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
from outrider.rpc.data_connection import connect
from outrider.rpc.deployment import TlsFiles
from outrider.rpc.frames import FrameSocket
from outrider.rpc.status import from_rpc_error
from outrider.rpc.targets import Target, Targets
from outrider.rpc.tasks import Background, in_thread
from outrider.rpc.versions import PROTOCOL_VERSION, agreed_version
from outrider.v1 import draft_pb2, proposer_pb2, scorer_pb2_grpc
from proposer_service.config import LinkConfig
from proposer_service.conversation import Call, Conversation, Direct, Streamed, Welcomed, write
from proposer_service.drafting_thread import DraftingThread
from proposer_service.metrics import ProposerMetrics

_log = logging.getLogger(__name__)

_CHUNK_BYTES: Final = 2**20  # of a projection
_CONNECT_TIMEOUT_S: Final = 5.0  # of the 10 s in which a scorer expects DataConnected
_STEADY_S: Final = 5.0  # a stream that lived this long starts the backoff afresh
_link_ids = itertools.count(1)


class ScorerLink:
    """Keeps one Draft stream to `target` from `run` until `drain` or cancellation.

    `hello` makes a Hello with a new incarnation.
    """

    def __init__(
        self,
        target: Target,
        hello: Callable[[], draft_pb2.Hello],
        thread: DraftingThread,
        config: LinkConfig,
        metrics: ProposerMetrics,
        tls: TlsFiles | None = None,
    ) -> None:
        self.target = target
        self._tls = tls
        self._hello = hello
        self._thread = thread
        self._config = config
        self._metrics = metrics
        self._conversation: Conversation | None = None
        self._draining = asyncio.Event()
        self._last_error: OutriderError | None = UnavailableError("not connected yet")

    def status(self) -> proposer_pb2.ScorerLink:
        conversation, error = self._conversation, self._last_error
        return proposer_pb2.ScorerLink(
            target=self.target.address,
            connected=conversation is not None,
            sessions=0 if conversation is None else conversation.num_sessions,
            last_error="" if error is None else error.message,
            refused=_is_refusal(error),
        )

    async def run(self) -> None:
        """Dial until drained or cancelled; raises nothing."""
        config, loop = self._config, asyncio.get_running_loop()
        backoff = config.backoff_first_s
        while not self._draining.is_set():
            started = loop.time()
            error = await self._dial()
            if self._draining.is_set():
                return
            if loop.time() - started > _STEADY_S:
                backoff = config.backoff_first_s
            self._log_error(error)
            wait = backoff
            if _is_refusal(error):
                wait = max(wait, config.refused_retry_s)
            elif isinstance(error, CapacityError):
                wait = max(wait, error.retry_after_s or 0.0)
            # Many proposers see a scorer die at the same moment, hence the jitter.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait * random.uniform(0.5, 1.0)):
                    await self._draining.wait()
            backoff = min(2 * backoff, config.backoff_max_s)

    async def drain(self, grace_s: float) -> None:
        """Say Goodbye, and wait at most `grace_s` for the scorer to close its sessions."""
        self._draining.set()
        if self._conversation is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace_s):
                    await self._conversation.say_goodbye()

    async def retire(self, grace_s: float) -> None:
        """Let the stream's sessions end by themselves, then drain."""
        self._draining.set()
        if self._conversation is not None:
            await self._conversation.until_unused()
            await self.drain(grace_s)

    def _log_error(self, error: OutriderError) -> None:
        """Log an error that differs from the last one."""
        if self._last_error is None or error.message != self._last_error.message:
            refused = _is_refusal(error)
            verb = "refused this proposer" if refused else "is not connected"
            level = logging.ERROR if refused else logging.WARNING
            _log.log(level, "scorer %s %s: %s (%s)", self.target, verb, error.message, error.reason)
        self._last_error = error

    async def _dial(self) -> OutriderError:
        """Run one stream from Hello to its end, and return why it ended."""
        try:
            # A new channel has none of gRPC's own backoff, and reads certificates anew.
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
            except Exception:  # even after a bug the scorer is dialled again
                _log.exception("the stream to scorer %s failed", self.target)
                return InternalError("the stream failed; the log has the details")
            finally:
                call.cancel()
        return UnavailableError("the scorer ended the stream")

    async def _converse(self, call: Call) -> None:
        hello = self._hello()
        with contextlib.ExitStack() as cleanup:
            async with asyncio.timeout(self._config.answer_timeout_s):
                await write(call, draft_pb2.DraftRequest(hello=hello))
                welcome = await self._read_welcome(call)
            frames = await self._connect(welcome)
            if frames is not None:
                cleanup.callback(frames.close)
            if welcome.HasField("data_connection"):
                used = draft_pb2.DataConnected(used=frames is not None)
                await self._send(call, draft_pb2.DraftRequest(data_connected=used))
            if welcome.wants_projection:
                matrix = self._thread.projection
                for start in range(0, len(matrix), _CHUNK_BYTES):
                    data = matrix[start : start + _CHUNK_BYTES]
                    chunk = draft_pb2.ProjectionChunk(offset=start, data=data)
                    await self._send(call, draft_pb2.DraftRequest(projection=chunk))
            if self._draining.is_set():  # since the dial; nobody would end the conversation
                return
            cleanup.pop_all()
        link, most = next(_link_ids), welcome.max_block_tokens
        stream = Welcomed(call, link, self._thread, self._config, most)
        await self._serve(Streamed(stream) if frames is None else Direct(stream, frames))

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

    async def _send(self, call: Call, message: draft_pb2.DraftRequest) -> None:
        async with asyncio.timeout(self._config.answer_timeout_s):
            await write(call, message)

    async def _connect(self, welcome: draft_pb2.Welcome) -> FrameSocket | None:
        """Return the data connection that Welcome offers, if there is one within reach."""
        if not welcome.HasField("data_connection"):
            return None
        offer, timeout_s = welcome.data_connection, self._config.connect_timeout_s
        connecting = in_thread(lambda: connect(self.target, offer, self._tls, timeout_s))
        try:
            # A name may have many addresses, each of which is tried for `timeout_s`.
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                return await asyncio.wrap_future(connecting)
        except (OSError, ConfigError) as error:
            connecting.add_done_callback(_close)  # the connection may still come
            why = str(error) or "it does not answer"
            _log.warning("scorer %s: no data connection, which is slower: %s", self.target, why)
            return None
        except asyncio.CancelledError:
            # On the thread: the loop may be closed by then.
            connecting.add_done_callback(_close)
            raise

    async def _serve(self, conversation: Conversation) -> None:
        self._conversation, self._last_error = conversation, None
        self._metrics.links.inc()
        _log.info("scorer %s connected", self.target)
        try:
            await conversation.run()
        finally:
            self._conversation = None
            self._metrics.links.dec()


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


def _close(connecting: Future[FrameSocket]) -> None:
    """Close a connection that came too late."""
    if connecting.exception() is None:
        connecting.result().close()


def _is_refusal(error: OutriderError | None) -> bool:
    return isinstance(error, ProposerRefusedError | InvalidRequestError)
