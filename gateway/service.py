"""A gateway as a process runs it: tokenizer, scorers, both faces."""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
from collections.abc import Awaitable, Iterator

import uvicorn
from prometheus_client import CollectorRegistry

from gateway.api_keys import ApiKeys
from gateway.config import GatewayConfig
from gateway.generation import Generator
from gateway.grpc_service import SERVICE_NAME, GenerationServicer, add_to_server
from gateway.http_api import create_app
from gateway.http_connection import PatientProtocol
from gateway.ports import allow_connections, bind, readable
from gateway.routing.scorer_load import ScorerLoad
from gateway.routing.scorers import ScorerPool
from gateway.workers.worker import Membership
from outrider.errors import ConfigError
from outrider.models.resolve import resolve_model
from outrider.models.tokenizer import Tokenizer
from outrider.rpc.runtime import progress
from outrider.rpc.server import ClientLimits, GrpcServer
from outrider.rpc.targets import Targets, join_address
from outrider.rpc.tasks import Background, in_thread
from outrider.rpc.telemetry import METRIC_PREFIX, Telemetry
from outrider.v1 import scorer_pb2

_BACKLOG = 4096  # what Linux allows by default
_FORCE_S = 1  # for what the grace's end has ended to be sent; whole seconds: uvicorn's type


class Gateway:
    """`outrider.rpc.runtime.Service`."""

    def __init__(self, config: GatewayConfig, telemetry: Telemetry) -> None:
        self._config = config
        self._telemetry = telemetry
        self._member: Membership | None = None
        self._pool: ScorerPool | None = None
        self._generator: Generator | None = None
        self._grpc: GrpcServer | None = None
        self._http: _HttpServer | None = None
        self._socket: socket.socket | None = None
        self._serving: asyncio.Task[None] | None = None
        self._background = Background()

    async def start(self) -> dict[str, str]:
        """Open every port, then wait for a scorer unless requests are held for one.

        Metrics and health answer from the beginning. Returns the addresses. Raises `ConfigError`.
        """
        config = self._config
        api_keys = ApiKeys.load(config.api_key_file)
        tokenizer = await asyncio.wrap_future(in_thread(lambda: _tokenizer(config.model)))
        allow_connections()
        self._socket = bind(config.host, config.http_port, share=config.worker is not None)
        shown, shared = self._telemetry.registry, None
        if config.worker is not None:
            self._member = member = Membership(config.worker, self._telemetry.registry)
            shown, shared = member.shown, member.counts
        self._pool = pool = ScorerPool(
            Targets(config.scorers, config.dns_refresh_s),
            lambda info: check_scorer(info, tokenizer),
            config.deployment.tls,
        )
        self._generator = generator = Generator(config, tokenizer, pool, self._telemetry, shared)
        load = ScorerLoad(pool, generator.admission, shared)
        shown.register(load.collector(METRIC_PREFIX + "gateway_"))
        if self._member is not None:
            self._background.start(self._member.tell(lambda: load.held))
        metrics = self._serve_metrics(shown)
        grpc = await self._serve_grpc(generator, api_keys)
        http = self._serve_http(generator, api_keys, self._public_metrics(load, shown))
        if config.hold_timeout_s is None:
            progress("gateway", f"waiting for a scorer at {', '.join(config.scorers)}")
            await pool.start(config.start_timeout_s)
        else:
            pool.follow()
        self._background.start(self._follow_health(pool, generator))
        return {"http": http, "grpc": grpc, **metrics}

    def _serve_metrics(self, shown: CollectorRegistry) -> dict[str, str]:
        """Serve metrics on a port of their own, if asked for, and return its address."""
        config = self._config
        if config.metrics_port is None:
            return {}
        where, shares = (config.host, config.metrics_port), config.worker is not None
        return {"metrics": self._telemetry.serve_metrics(*where, shown, share_port=shares)}

    async def _serve_grpc(self, generator: Generator, api_keys: ApiKeys) -> str:
        """Serve the gRPC face, and return its address."""
        config, servicer = self._config, GenerationServicer(generator, api_keys)
        self._grpc = GrpcServer(
            join_address(config.host, config.grpc_port),
            lambda server: add_to_server(servicer, server),
            [SERVICE_NAME],
            health_address=config.deployment.health_address(config.host),
            limits=ClientLimits(config.max_body_bytes, config.request_timeout_s),
            share_port=config.worker is not None,
        )
        port = await self._grpc.start()
        await self._grpc.set_serving(generator.accepting, process=True)
        return join_address(config.host, port)

    def _serve_http(
        self, generator: Generator, api_keys: ApiKeys, metrics: CollectorRegistry | None
    ) -> str:
        """Serve the HTTP face, and return its address."""
        config = self._config
        assert self._socket is not None
        self._http = _HttpServer(
            uvicorn.Config(
                create_app(generator, config, api_keys, metrics),
                http=PatientProtocol,
                log_config=None,
                log_level="warning",
                access_log=False,
                lifespan="off",
                timeout_graceful_shutdown=math.ceil(config.deployment.drain_grace_s) + _FORCE_S,
                h11_max_incomplete_event_size=64 * 2**10,
            )
        )
        with readable(config.host, config.http_port):
            self._socket.listen(_BACKLOG)  # from here on nobody is refused
        self._serving = asyncio.create_task(self._http.serve([self._socket]))
        return f"http://{join_address(config.host, self._socket.getsockname()[1])}"

    def _public_metrics(
        self, load: ScorerLoad, shown: CollectorRegistry
    ) -> CollectorRegistry | None:
        """Return what /metrics of the HTTP port shows; None: there is none."""
        config, vllm = self._config, CollectorRegistry()
        if config.metrics_port is None:
            vllm = shown
        elif not config.vllm_metrics:
            return None
        if config.vllm_metrics:
            vllm.register(load.collector("vllm:", config.served_model_name))
        return vllm

    async def stop(self) -> None:
        """Give streams under way the grace to end, and then end them with an error.

        No connection is taken meanwhile, so that clients who come back find another gateway; the
        metrics port goes on to the end.
        """
        grace_s = self._config.deployment.drain_grace_s
        await self._background.cancel()
        if self._generator is not None:
            self._generator.admission.drain(grace_s)
        if self._http is not None and self._serving is not None:
            self._http.should_exit = True
        stopping: list[Awaitable[object]] = []
        if self._grpc is not None:
            stopping.append(self._grpc.stop(grace_s + _FORCE_S))
        if self._serving is not None:
            stopping.append(asyncio.gather(self._serving, return_exceptions=True))
        await asyncio.gather(*stopping)
        if self._pool is not None:
            await self._pool.stop()
        if self._socket is not None:
            self._socket.close()
        if self._member is not None:
            self._member.leave()
        self._telemetry.shutdown()

    async def _follow_health(self, pool: ScorerPool, generator: Generator) -> None:
        """Say in the gRPC health of the service, as /health does, if requests are answered.

        The process as a whole stays SERVING, since a restart brings no scorer back.
        """
        assert self._grpc is not None
        while True:
            changed = pool.changed
            await self._grpc.set_serving(generator.accepting, process=True)
            await changed.wait()

    async def wait_failed(self) -> None:
        assert self._serving is not None
        await asyncio.shield(self._serving)


def check_scorer(info: scorer_pb2.GetScorerInfoResponse, tokenizer: Tokenizer) -> None:
    """Raise `ConfigError` for a scorer without streams, or whose tokens mean other things."""
    who = f"scorer {info.scorer_id} ({info.model})"
    if not info.steps_version:
        raise ConfigError(f"{who} offers no GenerateSteps, as gateways need: upgrade it.")
    if info.tokenizer_hash != tokenizer.hash:
        raise ConfigError(
            f"{who} uses another tokenizer than this gateway: start both with the same --model."
        )
    if info.vocab_size < tokenizer.needed_vocab_size:
        raise ConfigError(
            f"{who} knows {info.vocab_size} tokens, the tokenizer has "
            f"{tokenizer.needed_vocab_size}: use the tokenizer that the model was trained with."
        )


def _tokenizer(model: str | None) -> Tokenizer:
    """Maybe after a download. Raises `ConfigError`."""
    return Tokenizer.load(resolve_model(model, "target", tokenizer_only=True))


class _HttpServer(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Catch no signals: they belong to the process, not to this server."""
        yield
