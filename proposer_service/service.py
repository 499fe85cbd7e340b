"""A proposer process, with one drafting thread and a stream to each scorer."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import grpc

from outrider.device import device_id
from outrider.drafting.building.config import ModelConfig
from outrider.drafting.building.methods import build_proposer
from outrider.drafting.proposer import Proposer
from outrider.errors import UnavailableError
from outrider.hello import make_hello
from outrider.rpc import status
from outrider.rpc.runtime import importing, progress
from outrider.rpc.server import GrpcServer
from outrider.rpc.targets import Targets, join_address
from outrider.rpc.telemetry import Telemetry, configure
from outrider.v1 import draft_pb2, proposer_pb2, proposer_pb2_grpc
from proposer_service.config import ProposerConfig
from proposer_service.drafting_thread import DraftingThread, MethodInfo
from proposer_service.link import ScorerLink, ScorerLinks
from proposer_service.metrics import ProposerMetrics

Context = grpc.aio.ServicerContext[Any, Any]
SERVICE_NAME: Final = "outrider.v1.ProposerService"
_STOP_TIMEOUT_S: Final = 1.0
_SERVER_GRACE_S: Final = 0.5
_TOLD: Final = (
    *("proposer_id", "incarnation", "method", "model", "vocab_size", "tokenizer_hash"),
    *("max_sessions", "max_draft_tokens", "max_model_len", "protocol_version"),
)
"""Fields of Hello and of ProposerInfo with the same name and meaning."""


class ProposerService:
    """Implements `outrider.rpc.runtime.Service`. `build` runs on the drafting thread."""

    def __init__(
        self,
        config: ProposerConfig,
        build: Callable[[ProposerConfig], tuple[Proposer, str]] | None = None,
        telemetry: Telemetry | None = None,
    ) -> None:
        self._config = config
        self._build = build or _build
        self._telemetry = telemetry or configure("outrider-proposer")
        self._metrics = ProposerMetrics(self._telemetry.registry, config.pool)
        self._proposer_id = config.proposer_id or ""
        # Larger at each start of the process and at each dial.
        self._incarnation = time.time_ns() // 1000
        self._method: MethodInfo | None = None
        self._thread: DraftingThread | None = None
        self._server: GrpcServer | None = None
        self._links: ScorerLinks | None = None
        self._dialling: asyncio.Task[None] | None = None
        self._servicer: ProposerServicer | None = None

    async def start(self) -> dict[str, str]:
        """Bind, build the method, and dial. Scorers that are away are dialled again."""
        config = self._config
        loop = asyncio.get_running_loop()
        thread = DraftingThread(partial(self._build, config), loop, self._metrics, self._telemetry)
        deployment = config.deployment
        self._links = ScorerLinks(
            Targets(config.scorers, config.dns_refresh_s),
            lambda target: ScorerLink(
                target, self._next_hello, thread, config.link, self._metrics, deployment.tls
            ),
            deployment.drain_grace_s,
        )
        servicer = ProposerServicer(thread, self._hello, self._links)
        self._servicer = servicer
        self._server = GrpcServer(
            join_address(config.host, config.port),
            partial(proposer_pb2_grpc.add_ProposerServiceServicer_to_server, servicer),
            [SERVICE_NAME],
            health_address=deployment.health_address(config.host),
            tls=deployment.tls,
        )
        port = await self._server.start()
        addresses = {"grpc": join_address(config.host, port)}
        if config.metrics_port is not None:
            addresses["metrics"] = self._telemetry.serve_metrics(config.host, config.metrics_port)
        # Unique among the proposers of a host, and stable where the port is given.
        methods = "-".join(method.name for method in config.methods)
        self._proposer_id = self._proposer_id or f"{socket.gethostname()}-{methods}-{port}"
        self._thread = thread
        self._method = await thread.start(config.start_timeout_s)
        servicer.ready = True
        self._metrics.session_limit.set(self._method.traits.max_sessions)
        await self._server.set_serving(True)
        self._dialling = asyncio.create_task(self._links.run())
        return addresses

    async def stop(self) -> None:
        """Say Goodbye to the scorers, wait for them within a limit, and end."""
        if self._servicer is not None:
            self._servicer.ready = False
        if self._server is not None:
            await self._server.set_serving(False)
        if self._dialling is not None:
            self._dialling.cancel()
            await asyncio.gather(self._dialling, return_exceptions=True)
        if self._links is not None:
            await self._links.stop()
        ending = [asyncio.to_thread(self._telemetry.shutdown)]
        if self._server is not None:
            ending.append(self._server.stop(_SERVER_GRACE_S))
        if self._thread is not None:
            ending.append(self._thread.stop(_STOP_TIMEOUT_S))
        await asyncio.gather(*ending)

    async def wait_failed(self) -> None:
        assert self._thread is not None
        await self._thread.until_ended()

    def _next_hello(self) -> draft_pb2.Hello:
        self._incarnation += 1
        return self._hello()

    def _hello(self) -> draft_pb2.Hello:
        assert self._method is not None
        hello = make_hello(
            self._method.traits,
            self._method.tokenizer_hash,
            proposer_id=self._proposer_id,
            pool=self._config.pool,
            device=device_id(self._config.device),
        )
        hello.incarnation, hello.data_connection = self._incarnation, True
        return hello


class ProposerServicer(proposer_pb2_grpc.ProposerServiceServicer):
    """Answers UNAVAILABLE until it is `ready`."""

    def __init__(
        self, thread: DraftingThread, hello: Callable[[], draft_pb2.Hello], links: ScorerLinks
    ) -> None:
        self.ready = False
        self._thread = thread
        self._hello = hello
        self._links = links

    async def GetProposerInfo(  # noqa: N802
        self,
        request: proposer_pb2.GetProposerInfoRequest,  # noqa: ARG002
        context: Context,
    ) -> proposer_pb2.GetProposerInfoResponse:
        if not self.ready:
            error = UnavailableError("the proposer is starting or draining")
            await status.abort(context, error)
        hello = self._hello()
        return proposer_pb2.GetProposerInfoResponse(
            **{name: getattr(hello, name) for name in _TOLD},
            sessions=self._thread.num_sessions,
            scorers=self._links.status(),
        )


def _build(config: ProposerConfig) -> tuple[Proposer, str]:
    if any(isinstance(method, ModelConfig) for method in config.methods):
        with importing():  # torch, without which the other methods start
            import outrider.engine.model.loader  # noqa: F401
    return build_proposer(config.methods, config.max_sessions, partial(progress, "proposer"))
