"""Ranks of a replica after the first, which follow its steps and serve health alone."""

from __future__ import annotations

import contextlib
import logging
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import transformers
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from outrider.engine.model.parallel.ranks import Ranks
from outrider.errors import ConfigError, OutriderError, UnavailableError, refuse
from outrider.models.resolve import resolve_model
from outrider.rpc import runtime
from outrider.rpc.logs import configure_logging
from scorer_service.config import ScorerOptions
from scorer_service.core import NAME
from scorer_service.loading import join, load
from scorer_service.servicer import SERVICE_NAME


def follow(options: ScorerOptions, ranks: Ranks) -> int:
    """Follow the leader until it stops. Return 0, 1 if it is gone, 2 for a wrong option.

    Once the model is loaded, signals are ignored: the leader drains and needs this rank for that.
    """
    name = f"{NAME} rank {ranks.rank}"
    configure_logging(name)
    transformers.utils.logging.disable_progress_bar()
    # A Python handler would wait while C++ waits for the other ranks.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with _health(options, ranks) as healthy:
            folder = resolve_model(options.model, "target")
            group = join(options)
            assert group is not None
            model, _, _ = load(folder, options, group)
            for signum in (signal.SIGTERM, signal.SIGINT):
                signal.signal(signum, signal.SIG_IGN)
            healthy.set(SERVICE_NAME, health_pb2.HealthCheckResponse.SERVING)
            runtime.progress(name, f"follows with its part of {options.model} on {group.device}")
            group.follow(model)
    except OutriderError as error:
        code = refuse(name, error)
        return 1 if isinstance(error, UnavailableError) else code
    except Exception:
        logging.exception("a forward failed")
        return 1
    return 0


@contextlib.contextmanager
def _health(options: ScorerOptions, ranks: Ranks) -> Iterator[health.HealthServicer]:
    """Serve NOT_SERVING on `--health-port`, on machines where the leader does not listen."""
    servicer = health.HealthServicer()
    servicer.set(SERVICE_NAME, health_pb2.HealthCheckResponse.NOT_SERVING)
    server = grpc.server(ThreadPoolExecutor(max_workers=1))
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    address = options.deployment.health_address(options.host)
    if address is not None and ranks.local_rank == 0:
        try:
            server.add_insecure_port(address)
        except RuntimeError as error:
            raise ConfigError(f"--health-port: {address} cannot be listened on.") from error
    server.start()
    try:
        yield servicer
    finally:
        server.stop(None)
