"""The servers of a hosted draft side, on an event loop and thread of their own.

Proposers dial them as they dial any scorer. The sessions, the registry of proposers and the
transport are a scorer's own.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import shlex
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, cast

from outrider.config import SPECULATION_POLICIES, THREAD_SWITCH_S
from outrider.errors import ConfigError, DeadlineError, InvalidRequestError
from outrider.flag_types import port
from outrider.models.resolve import EMBEDDED, resolve_model
from outrider.rpc.deployment import Deployment, add_deployment_flags, take_deployment
from outrider.rpc.runtime import prepare_grpc
from outrider.rpc.targets import join_address
from outrider.types import Request, StepEvents
from outrider.vllm.draft_host import DraftHost, Listener

prepare_grpc()

if TYPE_CHECKING:
    from outrider.drafting.building.config import MethodConfig
    from scorer_service.config import ServedModel
    from scorer_service.drafting.in_process import InProcessProposer

_START_S, _STOP_S = 30.0, 1.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """The plug-in's flags, with the names and meanings of a scorer's."""

    host: str
    port: int
    data_port: int
    metrics_port: int
    listen_unix: str | None
    scorer_id: str
    speculation_policy: str
    hidden_features: str | None
    in_process_proposer: str | None
    deployment: Deployment

    @staticmethod
    def parse(flags: str, replica: int = 0) -> ServerOptions:
        """Read a line of flags; data-parallel ranks listen above the ports of the one before.

        Raises `ConfigError`.
        """
        p = _Parser(prog='--additional-config \'{"outrider": "FLAGS"}\'', add_help=False)
        p.add_argument("--host", default="127.0.0.1")
        p.add_argument("--port", type=port, default=7001)
        p.add_argument("--data-port", type=port, default=7002)
        p.add_argument("--metrics-port", type=port, default=0)
        p.add_argument("--listen-unix")
        p.add_argument("--scorer-id")
        p.add_argument("--speculation-policy", choices=SPECULATION_POLICIES, default="adaptive")
        p.add_argument("--hidden-features")
        p.add_argument("--in-process-proposer")
        add_deployment_flags(p)
        try:
            words = shlex.split(flags)
        except ValueError as error:
            p.error(f"{error} in {flags}")
        given = vars(p.parse_args(words))
        for name in ("port", "data_port", "metrics_port", "health_port"):
            given[name] = given[name] and given[name] + 2 * replica
        given["deployment"] = take_deployment(given)
        given["scorer_id"] = given["scorer_id"] or f"{socket.gethostname()}-{os.getpid()}"
        return ServerOptions(**given)

    def methods(self, model: str, device: str) -> tuple[MethodConfig, ...]:
        """Return those of the proposer in this process, which drafts for `model`.

        vLLM verifies chains, so heads draft no trees. Raises `ConfigError`.
        """
        if self.in_process_proposer is None:
            return ()
        from outrider.drafting.building.config import HeadConfig
        from scorer_service.drafting.in_process_flags import take

        ours = model == str(resolve_model(EMBEDDED, "target"))
        found = take(self.in_process_proposer, EMBEDDED if ours else model, device)
        return tuple(
            replace(each, tree_width=1) if isinstance(each, HeadConfig) else each for each in found
        )


def states_read_by(methods: Sequence[MethodConfig]) -> str | None:
    """Return the `--hidden-features` that methods read; None for none."""
    from scorer_service.drafting.in_process_flags import states_of

    return states_of(methods)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{self.prog}: {message}")


class DraftServer(Listener):
    """Serves proposers for a `DraftHost` from `start` to `stop`."""

    def __init__(
        self,
        host: DraftHost,
        options: ServerOptions,
        colocated: InProcessProposer | None = None,
    ) -> None:
        """Attach `colocated`, too, which drafts on the stepping thread."""
        self._host = host
        self._options = options
        self._colocated = colocated
        self._served: ServedModel | None = None
        self._hub: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Event | None = None
        self._started: Future[dict[str, str]] = Future()
        self._thread = threading.Thread(target=self._run, name="outrider-drafts", daemon=True)

    # The stepping thread.

    def start(self, served: ServedModel) -> dict[str, str]:
        """Listen, and return the addresses.

        Raises `ConfigError` for a port that is taken or a proposer in this process that does not
        fit, and `DeadlineError`.
        """
        self._served = served
        sys.setswitchinterval(min(THREAD_SWITCH_S, sys.getswitchinterval()))
        self._thread.start()
        try:
            return self._started.result(_START_S)
        except TimeoutError:
            raise DeadlineError(f"The draft side did not listen within {_START_S:g} s.") from None

    def stop(self) -> None:
        """Say goodbye to proposers, and end the thread."""
        if self._loop is not None and self._stopping is not None:
            self._post(self._stopping.set)
            self._thread.join(2 * _STOP_S)

    def opened(self, request: Request, traceparent: str) -> None:
        self._post(self._open, request, traceparent)

    def stepped(self, events: StepEvents) -> None:
        self._post(self._hub.on_events, events)

    def _post(self, call: Callable[..., object], *args: object) -> None:
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(call, *args)

    # The event loop's thread.

    def _open(self, request: Request, traceparent: str) -> None:
        self._hub.submit(request, traceparent).mailbox.close()  # vLLM answers the client

    def _run(self) -> None:
        import uvloop

        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(self._serve())
        except BaseException as error:
            if self._started.done():
                _log.exception("the draft side ended: requests go on without drafts")
            else:
                self._started.set_exception(error)

    async def _serve(self) -> None:
        from outrider.rpc.data_connection import DataPort
        from outrider.rpc.server import GrpcServer
        from outrider.rpc.telemetry import configure
        from scorer_service.call import SERVICE_NAME, Serving
        from scorer_service.config import DraftLimits
        from scorer_service.drafting.in_process_link import attach
        from scorer_service.drafting.side import LocalDrafts
        from scorer_service.hub import Hub
        from scorer_service.metrics import ScorerMetrics
        from scorer_service.servicer import ScorerServicer, add_to_server

        class Servicer(ScorerServicer):
            def accept(self) -> Serving:
                raise InvalidRequestError("send requests to vLLM's own server")

        options, served = self._options, self._served
        assert served is not None
        telemetry = configure("outrider-scorer")
        servicer = Servicer(telemetry)
        deployment = options.deployment
        places: dict[str, Any] = {"unix_path": options.listen_unix, "tls": deployment.tls}
        server = GrpcServer(
            join_address(options.host, options.port),
            partial(add_to_server, servicer),
            [SERVICE_NAME],
            health_address=deployment.health_address(options.host),
            **places,
        )
        data = DataPort(options.host, options.data_port, **places)
        engine = cast("Any", self._host)  # all of a `ServedEngine` that a hub uses
        async with contextlib.AsyncExitStack() as cleanup:
            cleanup.callback(telemetry.shutdown)
            grpc_port = await server.start()
            cleanup.push_async_callback(server.stop, _STOP_S)
            cleanup.push_async_callback(data.stop)
            addresses = {
                "grpc": join_address(options.host, grpc_port),
                "data": join_address(options.host, await data.start()),
                "metrics": telemetry.serve_metrics(options.host, options.metrics_port),
            }
            metrics = ScorerMetrics(telemetry.registry, served.served_model_name)
            self._hub = hub = Hub(engine, served, DraftLimits(), metrics)
            drafts = LocalDrafts(hub.blocks, data)
            servicer.begin(Serving(engine, hub, served, cast("Any", None), None, drafts))
            cleanup.push_async_callback(servicer.drain, 0.0)
            if self._colocated is not None:
                attach(hub.registry, self._host, self._colocated, served)
            await server.set_serving(True)
            self._loop, self._stopping = asyncio.get_running_loop(), asyncio.Event()
            self._host.listener = self
            self._started.set_result(addresses)
            await self._stopping.wait()
            self._host.listener = Listener()
