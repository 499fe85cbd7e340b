"""Traces and metrics, wired once per process.

Metrics are `prometheus_client` instruments in one registry: OpenTelemetry names cannot hold the
colon of `outrider:*`.
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
from outrider.rpc.exposition import MetricsServer, encode
from outrider.rpc.latency import LatencyMetrics

METRIC_PREFIX: Final = "outrider:"
_OTLP_ENDPOINT: Final = "OTEL_EXPORTER_OTLP_ENDPOINT"
_FLUSH_S: Final = 2.0
# The time at which a series began would double their number.
prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
_propagator = TraceContextTextMapPropagator()

Attributes = Mapping[str, str | int | float | bool]
Metadata = Iterable[tuple[str, str | bytes]]


@dataclass(frozen=True, slots=True)
class PastSpan:
    """Something that is over; times in nanoseconds since 1970."""

    name: str
    start: int
    end: int
    attributes: Attributes | None = None
    children: tuple[PastSpan, ...] = ()


class _Resource(Resource):
    """Hashed once: the exporter hashes it for each span, and the SDK makes JSON of it to do so."""

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
            # Records nothing, and passes a caller's trace context on untouched.
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

    def record(self, parent: trace.Span, spans: Iterable[PastSpan]) -> None:
        """Hands over spans below `parent`, which is open yet; nothing if that is not recorded.

        For many spans at once: made directly, one costs a quarter of what starting and ending it
        would. They are kept if the parent is, without asking the sampler again.
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

    def metrics_text(self, accept: str = "") -> tuple[bytes, str]:
        """The registry and its content type, for a service with an HTTP face of its own.

        OpenMetrics, the only format with exemplars, for a scraper whose Accept header asks for it.
        """
        return encode(self.registry, accept)

    def serve_metrics(self, host: str, port: int) -> str:
        """Serve /metrics from a thread; returns the URL. Raises `ConfigError` for a taken port."""
        assert self._http is None
        self._http = MetricsServer(host, port, self.registry)
        return self._http.url

    def shutdown(self) -> None:
        """Export what is left and stops; a collector out of reach costs 2 s at most."""
        if self._http is not None:
            self._http.close()
            self._http = None
        if self._provider is not None:
            assert self._exporter is not None
            # The SDK keeps no limit: OTLP's exporter tries for 10 s with each 512 spans.
            flush = threading.Thread(target=self._provider.force_flush, daemon=True)
            flush.start()
            flush.join(_FLUSH_S)
            if flush.is_alive():
                self._exporter.shutdown()
            self._provider.shutdown()


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


def _build_info(registry: prometheus_client.CollectorRegistry, service_name: str) -> None:
    info = prometheus_client.Gauge(
        METRIC_PREFIX + "build_info",
        "1 for each running process, with the version that it runs.",
        ("component", "version"),
        registry=registry,
    )
    info.labels(service_name.removeprefix("outrider-"), __version__).set(1)
