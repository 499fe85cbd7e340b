"""A scorer process: its servers around the core."""

from __future__ import annotations

from functools import partial
from typing import Final

from outrider.engines import NATIVE
from outrider.rpc import runtime
from outrider.rpc.data_connection import DataPort
from outrider.rpc.server import GrpcServer
from outrider.rpc.targets import join_address
from outrider.rpc.telemetry import Telemetry, configure
from scorer_service.call import SERVICE_NAME
from scorer_service.config import ScorerOptions
from scorer_service.core import NAME, ScorerCore
from scorer_service.servicer import ScorerServicer, add_to_server

_STOP_TIMEOUT_S: Final = 1.0


class ScorerApp:
    """Implements `outrider.rpc.runtime.Service`."""

    def __init__(self, options: ScorerOptions) -> None:
        self._options = options
        self._telemetry: Telemetry = configure("outrider-scorer")
        self._servicer = ScorerServicer(self._telemetry)
        self._core = ScorerCore(options, self._telemetry)
        deployment = options.deployment
        self._server = GrpcServer(
            join_address(options.host, options.port),
            partial(add_to_server, self._servicer),
            [SERVICE_NAME],
            unix_path=options.listen_unix,
            health_address=deployment.health_address(options.host),
            tls=deployment.tls,
        )
        self._data_port: DataPort | None = None
        if options.engine == NATIVE:  # else proposers are connected to vLLM's worker
            self._data_port = DataPort(
                options.host, options.data_port, unix_path=options.listen_unix, tls=deployment.tls
            )

    async def start(self) -> dict[str, str]:
        """Listen, with health NOT_SERVING, then load the model and serve.

        A model on this machine that cannot be served is refused before that, as far as config.json
        tells.
        """
        options = self._options
        await self._core.check()
        port = await self._server.start()
        data = ""
        if self._data_port is not None:
            data = join_address(options.host, await self._data_port.start())
        metrics_url = self._telemetry.serve_metrics(options.host, options.metrics_port)
        serving = await self._core.start(self._data_port)
        self._servicer.begin(serving)
        await self._server.set_serving(True)
        address = join_address(options.host, port)
        runtime.progress(NAME, f"serving {options.served_model_name} on {address}")
        cache = serving.info.num_pages * serving.info.page_size
        return {
            **{"grpc": address, "data": data, "metrics": metrics_url},
            **{"context": str(serving.served.max_model_len), "cache": str(cache)},
            "engine": options.engine,
        }

    async def stop(self) -> None:
        """Refuse new requests at once, and give the running ones the grace period."""
        await self._server.set_serving(False)
        await self._servicer.drain(self._options.deployment.drain_grace_s)
        await self._server.stop(_STOP_TIMEOUT_S)
        if self._data_port is not None:
            await self._data_port.stop()
        await self._core.stop(_STOP_TIMEOUT_S)
        self._telemetry.shutdown()

    async def wait_failed(self) -> None:
        """Return once the engine fails step after step, or hangs."""
        await self._core.wait_failed()
