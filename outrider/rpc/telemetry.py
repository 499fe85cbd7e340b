"""Traces and metrics of a process.

Metrics are `prometheus_client` instruments, since OpenTelemetry's names cannot hold the colon of
`outrider:*`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import prometheus_client
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor, SpanExporter
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from outrider import __version__
from outrider.rpc.exposition import MetricsServer
from outrider.rpc.latency import LatencyMetrics

METRIC_PREFIX: Final = "outrider:"
_OTLP_ENDPOINT: Final = "OTEL_EXPORTER_OTLP_ENDPOINT"
_FLUSH_S: Final = 2.0
# Series of creation times would double the number of series.
prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
_propagator = TraceContextTextMapPropagator()

Attributes = Mapping[str, str | int | float | bool]
Metadata = Iterable[tuple[str, str | bytes]]


@dataclass(frozen=True, slots=True)
class PastSpan:
    """A span that has ended; times in nanoseconds since 1970."""

    name: str
    start: int
    end: int
    attributes: Attributes | None = None
    children: tuple[PastSpan, ...] = ()


class _Resource(Resource):
    """A resource with a cached hash, since the exporter hashes it for each span, by way of JSON."""

    def __init__(self, resource: Resource) -> None:
        super().__init__(resource.attributes, resource.schema_url)
        self._hash = super().__hash__()

    def __hash__(self) -> int:
        return self._hash


class Telemetry:
    """A process's tracer and metrics registry. Make one with `configure`."""

    def __init__(self, service_name: str, exporter: SpanExporter | None, *, batch: bool) -> None:
        resource = _Resource(Resource.create({"service.name": service_name}))
        self._exporter = exporter
        self._provider: TracerProvider | None = None
        self._processor: SpanProcessor | None = None
        if exporter is None:
            # Records nothing, and passes on a caller's trace context.
            self.tracer: trace.Tracer = trace.NoOpTracer()
        else:
            self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
            self._processor = (
                BatchSpanProcessor(exporter) if batch else SimpleSpanProcessor(exporter)
            )
            self._provider.add_span_processor(self._processor)
            self.tracer = self._provider.get_tracer("outrider")
        self.registry = prometheus_client.CollectorRegistry()
        self.latency = LatencyMetrics(self.registry)
        _build_info(self.registry, service_name)
        self._http: MetricsServer | None = None

    @contextmanager
    def server_span(
        self, name: str, metadata: Metadata | None, attributes: Attributes | None = None
    ) -> Iterator[trace.Span]:
        """Open a SERVER span below the caller's span in `metadata`; it records errors."""
        yield from self._span(name, trace.SpanKind.SERVER, extract(metadata), attributes)

    @contextmanager
    def client_span(
        self, name: str, parent: trace.Span | None = None, attributes: Attributes | None = None
    ) -> Iterator[trace.Span]:
        """Open a CLIENT span, whose call gets `metadata=inject(span)`.

        The aio client interceptors of gRPC's instrumentation break cancellation.
        """
        context = trace.set_span_in_context(parent) if parent is not None else Context()
        yield from self._span(name, trace.SpanKind.CLIENT, context, attributes)

    def _span(
        self, name: str, kind: trace.SpanKind, context: Context, attributes: Attributes | None
    ) -> Iterator[trace.Span]:
        # The span is not made current, since an async generator may be closed in another context.
        span = self.tracer.start_span(name, context, kind, attributes)
        try:
            yield span
        except Exception as error:
            span.record_exception(error)
            span.set_status(trace.StatusCode.ERROR, type(error).__name__)
            raise
        finally:
            span.end()

    def record(self, parent: trace.Span, spans: Iterable[PastSpan]) -> None:
        """Record ended spans below the open span `parent`, if that is recorded.

        Making spans directly is much cheaper than to start and end them. The sampler is not asked
        again.
        """
        if not parent.is_recording() or not isinstance(parent, ReadableSpan):
            return
        self._record(parent, parent.get_span_context(), spans)

    def _record(
        self, source: ReadableSpan, parent: trace.SpanContext, spans: Iterable[PastSpan]
    ) -> None:
        assert self._provider is not None
        assert self._processor is not None
        for span in spans:
            context = trace.SpanContext(
                parent.trace_id,
                self._provider.id_generator.generate_span_id(),
                is_remote=False,
                trace_flags=parent.trace_flags,
                trace_state=parent.trace_state,
            )
            self._processor.on_end(
                ReadableSpan(
                    span.name,
                    context,
                    parent,
                    source.resource,
                    span.attributes,
                    start_time=span.start,
                    end_time=span.end,
                    instrumentation_scope=source.instrumentation_scope,
                )
            )
            self._record(source, context, span.children)

    def serve_metrics(
        self,
        host: str,
        port: int,
        shown: prometheus_client.CollectorRegistry | None = None,
        *,
        share_port: bool = False,
    ) -> str:
        """Serve /metrics from a thread, and return the URL. Raises `ConfigError`.

        The page has what is `shown` in place of this process's own metrics, if that is given.
        """
        assert self._http is None
        registry = self.registry if shown is None else shown
        self._http = MetricsServer(host, port, registry, share_port=share_port)
        return self._http.url

    def shutdown(self) -> None:
        """Export the remaining spans within 2 s, and stop."""
        if self._http is not None:
            self._http.close()
            self._http = None
        if self._provider is not None:
            assert self._exporter is not None
            # The SDK has no limit, and OTLP's exporter tries for 10 s with each 512 spans.
            flush = threading.Thread(target=self._provider.force_flush, daemon=True)
            flush.start()
            flush.join(_FLUSH_S)
            if flush.is_alive():
                self._exporter.shutdown()
            self._provider.shutdown()


def configure(service_name: str, *, exporter: SpanExporter | None = None) -> Telemetry:
    """Return the telemetry of this process.

    Spans go to `exporter` at once, or in batches over OTLP where OTEL_EXPORTER_OTLP_ENDPOINT is
    set, or nowhere. The SDK's other variables hold, too.
    """
    if exporter is not None:
        return Telemetry(service_name, exporter, batch=False)
    if os.environ.get(_OTLP_ENDPOINT):
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

        return Telemetry(service_name, OTLPSpanExporter(), batch=True)
    return Telemetry(service_name, None, batch=False)


def inject(span: trace.Span) -> tuple[tuple[str, str], ...]:
    """Return gRPC metadata that makes the callee's span a child of `span`."""
    carrier: dict[str, str] = {}
    _propagator.inject(carrier, trace.set_span_in_context(span, Context()))
    return tuple(carrier.items())


def extract(metadata: Metadata | None) -> Context:
    """Return the caller's trace context, empty if it is missing or malformed."""
    carrier = {key: value for key, value in metadata or () if isinstance(value, str)}
    return _propagator.extract(carrier, Context())


def _build_info(registry: prometheus_client.CollectorRegistry, service_name: str) -> None:
    info = prometheus_client.Gauge(
        METRIC_PREFIX + "build_info",
        "1 for each running process, with the version that it runs.",
        ("component", "version"),
        registry=registry,
    )
    info.labels(service_name.removeprefix("outrider-"), __version__).set(1)
