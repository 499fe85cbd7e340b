"""A gRPC server with health (grpc.health.v1), reflection and limits."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import grpc
from grpc_health.v1 import health, health_pb2_grpc

from outrider.errors import ConfigError
from outrider.rpc.channel import LIMITS, send_pings, take_pings
from outrider.rpc.decoding import DecodingInterceptor
from outrider.rpc.deployment import TlsFiles
from outrider.rpc.health import Health
from outrider.rpc.reflection import Reflection
from outrider.rpc.targets import no_unix_socket
from outrider.rpc.tls import server_credentials

_MAX_INT: Final = 2**31 - 1  # of gRPC's options
_MAX_PENDING: Final = 8192  # calls that have arrived, and that the event loop has not taken yet
_TELL_S: Final = 1.0
"""For clients that watch `health_address`: the time to read that their watch ended."""


@dataclass(frozen=True, slots=True)
class ClientLimits:
    """Limits of a server that anyone may dial.

    gRPC waits for a call's request without limit, before any of our code runs. So after
    `connection_s` the client has to open another connection, and `request_s` later the calls that
    are left end with UNAVAILABLE.
    """

    max_request_bytes: int
    request_s: float
    connection_s: float = 300.0

    def options(self) -> tuple[tuple[str, int], ...]:
        """Return gRPC's options, without pings, whose answers a slow line would delay."""
        return (
            ("grpc.max_receive_message_length", min(self.max_request_bytes, _MAX_INT)),
            ("grpc.max_connection_age_ms", round(self.connection_s * 1e3)),
            ("grpc.max_connection_age_grace_ms", min(round(self.request_s * 1e3), _MAX_INT)),
        )


class GrpcServer:
    """Serves on `address` ("host:port", port 0 for a free one) from `start` to `stop`.

    With `tls`, `address` speaks TLS only. `unix_path` never speaks TLS, nor does `health_address`,
    which serves health alone, since Kubernetes' gRPC probes cannot. Health says NOT_SERVING, for
    the server and each of `service_names` (full: "outrider.v1.ScorerService"), until
    `set_serving(True)`. Without `limits`, connections of clients last. With `share_port`, the
    kernel shares the connections out among the processes of this user that serve there, too.
    """

    def __init__(
        self,
        address: str,
        register: Callable[[grpc.aio.Server], None],
        service_names: Sequence[str],
        *,
        unix_path: str | None = None,
        health_address: str | None = None,
        tls: TlsFiles | None = None,
        limits: ClientLimits | None = None,
        share_port: bool = False,
    ) -> None:
        self._address = address
        self._register = register
        self._service_names = tuple(service_names)
        self._health, self._probed_health = Health(), Health()
        self._reflection = Reflection(*service_names, health.SERVICE_NAME)
        self._unix_path = unix_path
        self._health_address = health_address
        self._tls = tls
        self._limits = limits
        self._share_port = share_port
        self._servers: list[grpc.aio.Server] = []

    async def start(self) -> int:
        """Start, and return the port. Raises `ConfigError` if it cannot be bound."""
        server = _new_server(self._limits, share_port=self._share_port)
        self._register(server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        self._reflection.add_to_server(server)
        await self.set_serving(False)
        credentials = None if self._tls is None else server_credentials(self._tls)
        port = _bind(server, self._address, credentials)
        if self._unix_path is not None:
            _refuse_served(self._unix_path)
            _bind(server, f"unix:{self._unix_path}")
        servers = [server]
        if self._health_address is not None:
            servers.append(probed := _new_server(share_port=self._share_port))
            health_pb2_grpc.add_HealthServicer_to_server(self._probed_health, probed)
            _bind(probed, self._health_address)
        for each in servers:
            await each.start()
        self._servers = servers
        return port

    async def set_serving(self, serving: bool, *, process: bool | None = None) -> None:
        """Set the answers to health checks: of the services, and of the process as a whole.

        That is the services' unless `process` says another.
        """
        statuses = dict.fromkeys(self._service_names, serving)
        statuses[""] = serving if process is None else process
        self._health.set(statuses)
        self._probed_health.set(statuses)

    async def stop(self, grace_s: float) -> None:
        """Refuse new RPCs at once, and cancel the running ones after `grace_s` seconds.

        Until then `health_address` says NOT_SERVING.
        """
        told = (self._health, self._probed_health)
        for each in told:
            each.end()
        self._reflection.end()
        servers, self._servers = self._servers, []
        for server, each, its_grace_s in zip(servers, told, (grace_s, _TELL_S), strict=False):
            each.end_watches()
            await server.stop(its_grace_s)


def _new_server(limits: ClientLimits | None = None, *, share_port: bool = False) -> grpc.aio.Server:
    for_clients = send_pings() if limits is None else limits.options()
    options = dict((*LIMITS, *take_pings(), *for_clients))
    # Unless it is meant, refuse a second server on the port, which would share its connections.
    options["grpc.so_reuseport"] = int(share_port)
    # Else gRPC cancels some of more than 1,000 that arrive together, and nothing says why.
    options["grpc.server.max_pending_requests"] = _MAX_PENDING
    options["grpc.server.max_pending_requests_hard_limit"] = _MAX_PENDING
    return grpc.aio.server(interceptors=(DecodingInterceptor(),), options=tuple(options.items()))


def _refuse_served(path: str) -> None:
    """Raise `ConfigError` where a server listens, since gRPC would take its socket away."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        if probe.connect_ex(path) in (0, errno.EAGAIN):  # EAGAIN: it has too many to accept
            raise ConfigError(
                f"cannot listen on unix:{path}: another server does. Choose another path."
            )


def _bind(
    server: grpc.aio.Server, address: str, credentials: grpc.ServerCredentials | None = None
) -> int:
    try:
        if credentials is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, credentials)
    except RuntimeError as error:
        if address.startswith("unix:"):
            raise no_unix_socket(address) from error
        raise ConfigError(
            f"cannot listen on {address}: the port is taken or the address is not "
            "this machine's. Choose another, or port 0 for a free one."
        ) from error
