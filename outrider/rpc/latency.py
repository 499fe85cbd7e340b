"""OpenTelemetry's `gen_ai.server.*` histograms, with exemplars that lead to a request's trace.

`prometheus_client` makes them, under the names and labels of OpenTelemetry's Prometheus exporter,
which writes no exemplars.
https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-metrics/
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from opentelemetry import trace
from prometheus_client import CollectorRegistry, Histogram

_LABELS: Final = ("gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model")
REQUEST_S: Final = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0),
    *(10.0, 20.0, 40.0, 80.0),
)
_TOKEN_S: Final = (
    *(0.0005, 0.001, 0.0015, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03),
    *(0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0),
)


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """Times of one request, in seconds."""

    duration_s: float
    time_to_first_token_s: float | None
    output_tokens: int


class LatencyMetrics:
    """The histograms of one registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def histogram(name: str, description: str, buckets: Sequence[float]) -> Histogram:
            return Histogram(
                f"gen_ai_server_{name}_seconds",
                description,
                _LABELS,
                buckets=buckets,
                registry=registry,
            )

        self._duration = histogram("request_duration", "End-to-end time of a request.", REQUEST_S)
        self._ttft = histogram(
            "time_to_first_token", "Time from a request to its first token.", REQUEST_S
        )
        self._tpot = histogram("time_per_output_token", "Time per token after the first.", _TOKEN_S)

    def record(self, operation: str, model: str, times: RequestTimes, span: trace.Span) -> None:
        """Record a finished request with its span, which is still open."""
        labels = (operation, "outrider", model)
        exemplar = _exemplar(span)
        self._duration.labels(*labels).observe(times.duration_s, exemplar)
        if times.time_to_first_token_s is None:
            return
        self._ttft.labels(*labels).observe(times.time_to_first_token_s, exemplar)
        if times.output_tokens > 1:
            rest_s = times.duration_s - times.time_to_first_token_s
            self._tpot.labels(*labels).observe(rest_s / (times.output_tokens - 1), exemplar)


def _exemplar(span: trace.Span) -> dict[str, str] | None:
    """Return a link to the span's trace, unless the trace is not recorded."""
    if not span.is_recording():
        return None
    context = span.get_span_context()
    return {
        "trace_id": trace.format_trace_id(context.trace_id),
        "span_id": trace.format_span_id(context.span_id),
    }
