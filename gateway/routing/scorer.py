"""One scorer as this gateway sees it: a connection that follows its certificates."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncGenerator

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from gateway.routing.rounds import Round, TakeRound
from gateway.routing.steps import StepsStream
from outrider.errors import ConfigError, InvalidRequestError, OutriderError
from outrider.rpc.channel import MAX_MESSAGE_BYTES, open_channel
from outrider.rpc.deployment import TlsFiles
from outrider.rpc.status import from_rpc_error
from outrider.rpc.targets import Target
from outrider.rpc.tasks import Background
from outrider.rpc.tls import Stamp, stamp
from outrider.v1 import scorer_pb2, scorer_pb2_grpc

_SERVICE = "outrider.v1.ScorerService"
_PROBE_TIMEOUT_S = 2.0
_MAX_REQUEST_BYTES = MAX_MESSAGE_BYTES - 2**16
CLOSE_GRACE_S = 24 * 3600.0
"""For requests on a connection that takes no new ones: their own deadlines end them before."""
_log = logging.getLogger(__name__)


class Scorer:
    """The pool alone changes `serving` and `info`.

    Raises `ConfigError` for TLS files that cannot be read.
    """

    def __init__(self, target: Target, tls: TlsFiles | None = None) -> None:
        self.target = target.address
        self.serving = False
        self.in_flight = 0
        self.info = scorer_pb2.GetScorerInfoResponse()  # empty unless it fits
        self._where = target
        self._tls = tls
        self._steps: StepsStream | None = None  # none before the first request
        self._closing = Background()
        self._connect(None if tls is None else stamp(tls))

    async def generate(
        self,
        request: scorer_pb2.ScorerServiceGenerateRequest,
        metadata: tuple[tuple[str, str], ...],
        timeout_s: float,
        take_round: TakeRound | None = None,
    ) -> AsyncGenerator[Round, None]:
        """Yield the scorer's answer, but for what `take_round` takes.

        Closing the iterator aborts the request. Raises `OutriderError`s.
        """
        size = request.ByteSize()
        if size > _MAX_REQUEST_BYTES:  # it would end the stream with all its requests
            raise InvalidRequestError(
                f"The request has {size} bytes on the way to a scorer, which takes "
                f"{_MAX_REQUEST_BYTES} at most: shorten its texts and lists."
            )
        self.in_flight += 1
        try:
            with self._stream().begun(request, metadata, timeout_s, take_round) as answer:
                finish_reason = None
                while finish_reason is None:
                    round_ = await answer.take()
                    finish_reason = round_.finish_reason
                    yield round_
        finally:
            self.in_flight -= 1

    def _stream(self) -> StepsStream:
        """Return the stream of the present connection."""
        if self._steps is None or self._steps.broken:
            self._steps = StepsStream(self._stub)
        return self._steps

    async def probe(self) -> bool:
        """Whether it says that it serves."""
        self._renew()
        try:
            answer = await self._health.Check(
                health_pb2.HealthCheckRequest(service=_SERVICE), timeout=_PROBE_TIMEOUT_S
            )
        except grpc.aio.AioRpcError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    async def fetch_info(self) -> scorer_pb2.GetScorerInfoResponse:
        """Raise `OutriderError`."""
        try:
            info: scorer_pb2.GetScorerInfoResponse = await self._stub.GetScorerInfo(
                scorer_pb2.GetScorerInfoRequest(), timeout=_PROBE_TIMEOUT_S
            )
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        return info

    async def refresh_load(self) -> None:
        """Read its queue and cache again; what cannot be read stays as it was."""
        with contextlib.suppress(OutriderError):
            load = await self.fetch_info()
            for field in ("running_requests", "waiting_requests", "total_pages", "free_pages"):
                setattr(self.info, field, getattr(load, field))

    async def close(self, grace_s: float = 0.0) -> None:
        """Take no new request, and give those under way `grace_s` seconds."""
        if self._steps is not None and grace_s:
            self._steps.retire()
        elif self._steps is not None:
            await self._steps.close()
        await self._channel.close(grace_s)
        await self._closing.cancel()

    def _connect(self, certificates: Stamp | None) -> None:
        self._channel = open_channel(self._where, self._tls)
        self._stub = scorer_pb2_grpc.ScorerServiceStub(self._channel)
        self._steps = None
        self._health = health_pb2_grpc.HealthStub(self._channel)
        self._connected_with = certificates

    def _renew(self) -> None:
        """Connect anew if the certificates were replaced; requests under way end where they are.

        gRPC would go on with the ones it was given first, and fail when they have expired.
        """
        former, steps = self._channel, self._steps
        try:
            certificates = None if self._tls is None else stamp(self._tls)
            if certificates == self._connected_with:
                return
            self._connect(certificates)
        except ConfigError as error:
            _log.warning("keeping the former certificate: %s", error.message)
            return
        if steps is not None:
            steps.retire()
        self._closing.start(former.close(CLOSE_GRACE_S))
