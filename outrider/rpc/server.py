"""A gRPC server with health (grpc.health.v1), reflection and limits."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from outrider.errors import ConfigError
from outrider.rpc.channel import LIMITS

_OPTIONS: tuple[tuple[str, int], ...] = (
    *LIMITS,
    # Two servers on one port would share its connections by chance: refuse the second instead.
    ("grpc.so_reuseport", 0),
    # Accept the keepalive of `open_channel`; the default calls it abuse and hangs up.
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
)


class GrpcServer:
    """Serves on `address` ("host:port", port 0 for a free one) from `start` to `stop`.

    Health says NOT_SERVING, for the server and each of `service_names`, until
    `set_serving(True)`. `service_names` are full names: "outrider.v1.ScorerService".
    """

    def __init__(
        self,
        address: str,
        register: Callable[[grpc.aio.Server], None],
        service_names: Sequence[str],
    ) -> None:
        self._address = address
        self._register = register
        self._service_names = tuple(service_names)
        self._health = health.aio.HealthServicer()
        self._server: grpc.aio.Server | None = None

    async def start(self) -> int:
        """Binds and starts; returns the port. Raises `ConfigError` if the port cannot be bound."""
        server = grpc.aio.server(options=_OPTIONS)
        self._register(server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        reflected = (*self._service_names, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(reflected, server)
        await self.set_serving(False)
        try:
            port = server.add_insecure_port(self._address)
        except RuntimeError as error:
            raise ConfigError(
                f"cannot listen on {self._address}: the port is taken or the address is not "
                "this machine's. Choose another, or port 0 for a free one."
            ) from error
        await server.start()
        self._server = server
        return port

    async def set_serving(self, serving: bool) -> None:
        """What health checks are told from now on."""
        status = (
            health_pb2.HealthCheckResponse.SERVING
            if serving
            else health_pb2.HealthCheckResponse.NOT_SERVING
        )
        for name in ("", *self._service_names):
            await self._health.set(name, status)

    async def stop(self, grace_s: float) -> None:
        """Refuses new RPCs at once; running ones are cancelled after `grace_s` seconds."""
        await self._health.enter_graceful_shutdown()
        if self._server is not None:
            await self._server.stop(grace_s)
            self._server = None
