"""An OTLP receiver in this process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps the ids of the traces that it receives, in all and by service."""

    def __init__(self) -> None:
        self.by_service: dict[str, set[str]] = {}

    @property
    def trace_ids(self) -> set[str]:
        return set().union(*self.by_service.values())

    def Export(self, request: Any, _context: object) -> Any:  # noqa: N802
        for resource in request.resource_spans:
            attributes = {a.key: a.value.string_value for a in resource.resource.attributes}
            ids = self.by_service.setdefault(attributes.get("service.name", ""), set())
            for scope in resource.scope_spans:
                ids.update(span.trace_id.hex() for span in scope.spans)
        return trace_service_pb2.ExportTraceServiceResponse()


@contextlib.contextmanager
def collecting() -> Iterator[tuple[Collector, str]]:
    """Serve a receiver within the context; yield it with its address."""
    collector = Collector()
    server = grpc.server(futures.ThreadPoolExecutor(1))  # one writer of the collector
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(  # type: ignore[no-untyped-call]
        collector, server
    )
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield collector, f"http://127.0.0.1:{port}"
    finally:
        server.stop(0)
