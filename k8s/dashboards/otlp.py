"""An OTLP receiver in this process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Counts the spans that it receives, and keeps the ids of their traces."""

    def __init__(self) -> None:
        self.spans = 0
        self.trace_ids: set[str] = set()

    def Export(self, request: Any, _context: object) -> Any:  # noqa: N802
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                self.spans += len(scope.spans)
                self.trace_ids.update(span.trace_id.hex() for span in scope.spans)
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
