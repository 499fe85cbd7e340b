"""Traces and metrics, wired once per process.

Two kinds of metrics end in one Prometheus registry: `outrider:*` (vLLM's names under our prefix)
are `prometheus_client` instruments, because OpenTelemetry names cannot hold a colon;
`gen_ai.server.*` are OpenTelemetry histograms, read through its Prometheus reader.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import prometheus_client
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.view import ExplicitBucketHistogramAggregation, View
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor, SpanExporter
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from outrider.errors import ConfigError

METRIC_PREFIX: Final = "outrider:"
_OTLP_ENDPOINT: Final = "OTEL_EXPORTER_OTLP_ENDPOINT"
_SECONDS: Final = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0),
    *(10.0, 20.0, 40.0, 80.0),
)
_propagator = TraceContextTextMapPropagator()

Attributes = Mapping[str, str | int | float | bool]
Metadata = Iterable[tuple[str, str | bytes]]


@dataclass(frozen=True)
class RequestTimes:
    """The `gen_ai.server.*` histograms; times in seconds."""

    duration_s: float
    time_to_first_token_s: float | None
    output_tokens: int


class Telemetry:
    """A process's tracer and metrics registry. Make one with `configure`."""

    def __init__(self, service_name: str, exporter: SpanExporter | None, *, batch: bool) -> None:
        resource = Resource.create({"service.name": service_name})
        self._provider: TracerProvider | None = None
        if exporter is None:
            # Records nothing, and passes a caller's trace context on untouched.
            self.tracer: trace.Tracer = trace.NoOpTracer()
        else:
            self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
            self._provider.add_span_processor(
                BatchSpanProcessor(exporter) if batch else SimpleSpanProcessor(exporter)
            )
            self.tracer = self._provider.get_tracer("outrider")
        self.registry = prometheus_client.CollectorRegistry()
        self._reader = PrometheusMetricReader(registry=self.registry, scope_info_enabled=False)
        self._meters = MeterProvider(
            metric_readers=[self._reader],
            resource=resource,
            views=[
                View(
                    instrument_name="gen_ai.server.*",
                    aggregation=ExplicitBucketHistogramAggregation(_SECONDS),
                )
            ],
            shutdown_on_exit=False,
        )
        meter = self._meters.get_meter("outrider")
        self._duration = meter.create_histogram(
            "gen_ai.server.request.duration", "s", "End-to-end time of a request."
        )
        self._ttft = meter.create_histogram(
            "gen_ai.server.time_to_first_token", "s", "Time from a request to its first token."
        )
        self._tpot = meter.create_histogram(
            "gen_ai.server.time_per_output_token", "s", "Time per token after the first."
        )
        self._http: _MetricsServer | None = None

    @contextmanager
    def server_span(
        self, name: str, metadata: Metadata | None, attributes: Attributes | None = None
    ) -> Iterator[trace.Span]:
        """A SERVER span, child of the caller's span in `metadata`. Errors are recorded on it."""
        yield from self._span(name, trace.SpanKind.SERVER, extract(metadata), attributes)

    @contextmanager
    def client_span(
        self,
        name: str,
        parent: trace.Span | None = None,
        attributes: Attributes | None = None,
    ) -> Iterator[trace.Span]:
        """A CLIENT span; pass `metadata=inject(span)` to the call.

        Started by hand: the gRPC instrumentation's aio client interceptors break cancellation.
        """
        context = trace.set_span_in_context(parent) if parent is not None else Context()
        yield from self._span(name, trace.SpanKind.CLIENT, context, attributes)

    def _span(
        self,
        name: str,
        kind: trace.SpanKind,
        context: Context,
        attributes: Attributes | None,
    ) -> Iterator[trace.Span]:
        # Not made current: an async generator may be closed in another context than it began.
        span = self.tracer.start_span(name, context, kind, attributes)
        try:
            yield span
        except Exception as error:
            span.record_exception(error)
            span.set_status(trace.StatusCode.ERROR, type(error).__name__)
            raise
        finally:
            span.end()

    def record_request(self, operation: str, model: str, times: RequestTimes) -> None:
        """One finished request into the `gen_ai.server.*` histograms."""
        attributes = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "outrider",
            "gen_ai.request.model": model,
        }
        self._duration.record(times.duration_s, attributes)
        if times.time_to_first_token_s is None:
            return
        self._ttft.record(times.time_to_first_token_s, attributes)
        if times.output_tokens > 1:
            rest_s = times.duration_s - times.time_to_first_token_s
            self._tpot.record(rest_s / (times.output_tokens - 1), attributes)

    def metrics_text(self) -> bytes:
        """The registry in Prometheus' text format, for a service with an HTTP face of its own."""
        return prometheus_client.generate_latest(self.registry)

    def serve_metrics(self, host: str, port: int) -> str:
        """Serves /metrics from a thread; returns the URL. Raises `ConfigError` for a taken port."""
        assert self._http is None
        self._http = _MetricsServer(host, port, self.registry)
        return self._http.url

    def shutdown(self) -> None:
        """Exports what is left and stops; a collector out of reach costs 2 s at most."""
        if self._http is not None:
            self._http.close()
            self._http = None
        if self._provider is not None:
            self._provider.force_flush(timeout_millis=2_000)
            self._provider.shutdown()
        self._meters.shutdown(timeout_millis=2_000)


def configure(service_name: str, *, exporter: SpanExporter | None = None) -> Telemetry:
    """The telemetry of one process.

    Spans go to `exporter` at once, or in batches over OTLP where OTEL_EXPORTER_OTLP_ENDPOINT is
    set (the SDK's other variables hold too, OTEL_TRACES_SAMPLER among them); else nowhere.
    """
    if exporter is not None:
        return Telemetry(service_name, exporter, batch=False)
    if os.environ.get(_OTLP_ENDPOINT):
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

        return Telemetry(service_name, OTLPSpanExporter(), batch=True)
    return Telemetry(service_name, None, batch=False)


def inject(span: trace.Span) -> tuple[tuple[str, str], ...]:
    """gRPC metadata that makes the callee's span a child of `span`."""
    carrier: dict[str, str] = {}
    _propagator.inject(carrier, trace.set_span_in_context(span, Context()))
    return tuple(carrier.items())


def extract(metadata: Metadata | None) -> Context:
    """The caller's trace context; an empty one where there is none or it is malformed."""
    carrier = {key: value for key, value in metadata or () if isinstance(value, str)}
    return _propagator.extract(carrier, Context())


class EventSampler:
    """Which rounds of a request become span events: the first 8, then every 16th, 64 at most."""

    _FIRST, _EVERY, _LIMIT = 8, 16, 64

    def __init__(self, span: trace.Span) -> None:
        self._span = span
        self._seen = 0
        self._added = 0

    def add(self, name: str, attributes: Attributes) -> None:
        seen, self._seen = self._seen, self._seen + 1
        wanted = seen < self._FIRST or seen % self._EVERY == 0
        if wanted and self._added < self._LIMIT and self._span.is_recording():
            self._added += 1
            self._span.add_event(name, attributes, time.time_ns())


class _MetricsServer:
    def __init__(self, host: str, port: int, registry: prometheus_client.CollectorRegistry) -> None:
        try:
            self._server, self._thread = prometheus_client.start_http_server(
                port, addr=host, registry=registry
            )
        except OSError as error:
            raise ConfigError(
                f"cannot serve metrics on {host}:{port}: {error.strerror or error}. "
                "Choose another port, or 0 for a free one."
            ) from error
        self.url = f"http://{host}:{self._server.server_port}/metrics"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=2)
