"""The gateway's own Prometheus instruments, beside the gen_ai.server.* histograms."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge

from outrider.errors import OutriderError
from outrider.rpc.telemetry import METRIC_PREFIX
from outrider.v1 import common_pb2


class GatewayMetrics:
    """Registers once per registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        prefix = f"{METRIC_PREFIX}gateway_"

        def gauge(name: str, about: str) -> Gauge:
            return Gauge(prefix + name, about, registry=registry)

        def counter(name: str, about: str, labels: Sequence[str] = ()) -> Counter:
            return Counter(prefix + name, about, labels, registry=registry)

        self.in_flight = gauge("requests_in_flight", "Completions under way: open streams.")
        self.limit = gauge("requests_limit", "Completions that may be under way at once.")
        self.refused = counter(
            "requests_refused", "Requests refused because too many were under way."
        )
        self.scorers = gauge("scorers_serving", "Scorers that this gateway can send requests to.")
        self.hold = gauge(
            "hold_seconds",
            "How long a request is held while no scorer serves; 0: it needs one at once.",
        )
        self._requests = counter(
            "requests",
            "Completions by how they ended: ok, cancelled or an error's reason.",
            ("operation", "outcome"),
        )
        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens of completions.")
        self._generation_tokens = counter(
            "generation_tokens", "Tokens returned to clients, counted when their completion ends."
        )
        self.retries = counter("retries", "Times a completion was moved to another scorer.")

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
