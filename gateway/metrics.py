"""The gateway's own Prometheus instruments, beside the gen_ai.server.* histograms."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge

from outrider.errors import OutriderError
from outrider.rpc.telemetry import METRIC_PREFIX
from outrider.v1 import common_pb2


class GatewayMetrics:
    """Registers once per registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.in_flight = Gauge(
            f"{METRIC_PREFIX}gateway_requests_in_flight",
            "Completions under way: open streams.",
            registry=registry,
        )
        self.limit = Gauge(
            f"{METRIC_PREFIX}gateway_requests_limit",
            "Completions that may be under way at once.",
            registry=registry,
        )
        self.refused = Counter(
            f"{METRIC_PREFIX}gateway_requests_refused",
            "Requests refused because too many were under way.",
            registry=registry,
        )
        self.scorers = Gauge(
            f"{METRIC_PREFIX}gateway_scorers_serving",
            "Scorers that this gateway can send requests to.",
            registry=registry,
        )
        self.hold = Gauge(
            f"{METRIC_PREFIX}gateway_hold_seconds",
            "How long a request is held while no scorer serves; 0: it needs one at once.",
            registry=registry,
        )
        self._requests = Counter(
            f"{METRIC_PREFIX}gateway_requests",
            "Completions by how they ended: ok, cancelled or an error's reason.",
            ("operation", "outcome"),
            registry=registry,
        )
        self._prompt_tokens = Counter(
            f"{METRIC_PREFIX}gateway_prompt_tokens",
            "Prompt tokens of completions.",
            registry=registry,
        )
        self._generation_tokens = Counter(
            f"{METRIC_PREFIX}gateway_generation_tokens",
            "Tokens returned to clients, counted when their completion ends.",
            registry=registry,
        )
        self.retries = Counter(
            f"{METRIC_PREFIX}gateway_retries",
            "Times a completion was moved to another scorer.",
            registry=registry,
        )

    @contextlib.contextmanager
    def outcome(self, operation: str, cancelled_by: Callable[[], str]) -> Iterator[None]:
        """Count how its body ends; `cancelled_by` says what a cancelled one ends as."""
        outcome = "ok"
        try:
            yield
        except (asyncio.CancelledError, GeneratorExit):
            outcome = cancelled_by()
            raise
        except OutriderError as error:
            outcome = error.reason
            raise
        except Exception:
            outcome = "INTERNAL"
            raise
        finally:
            self._requests.labels(operation, outcome).inc()

    def completed(self, usage: common_pb2.Usage) -> None:
        """Count a completion that ended well."""
        self._prompt_tokens.inc(usage.prompt_tokens)
        self._generation_tokens.inc(usage.completion_tokens)
