"""One trace per request across three processes, as an OTLP collector sees it."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1 import trace_pb2

from outrider.cli.client import GenerateOptions
from tests.support.up import complete, running

pytestmark = pytest.mark.timeout(400)


class Collector(trace_service_pb2_grpc.TraceServiceServicer):  # type: ignore[misc]
    """Keeps what it is sent: (service, span)."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, trace_pb2.Span]] = []

    async def Export(  # noqa: N802
        self, request: Any, _context: object
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        for resource in request.resource_spans:
            names = {a.key: a.value.string_value for a in resource.resource.attributes}
            for scope in resource.scope_spans:
                self.spans += [(names["service.name"], span) for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    async def until(self, services: set[str]) -> list[tuple[str, trace_pb2.Span]]:
        deadline = time.monotonic() + 30
        while (seen := {service for service, _ in self.spans}) != services:
            assert time.monotonic() < deadline, f"spans only of {seen}"
            await asyncio.sleep(0.05)
        return self.spans


async def test_one_request_is_one_trace_over_three_services(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    collector = Collector()
    server = grpc.aio.server()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "200")
    stack = running("--model", pair[0], "--draft-model", pair[1])
    try:
        up = await asyncio.to_thread(stack.__enter__)
        done = await complete(
            up.grpc,
            GenerateOptions(
                prompt="def f(", max_tokens=24, ignore_eos=True, temperature=0.0, aux_info=True
            ),
        )
        spans = await collector.until({"outrider-gateway", "outrider-scorer", "outrider-proposer"})
    finally:
        await asyncio.to_thread(stack.__exit__, None, None, None)
        await server.stop(0)
    assert len({span.trace_id for _, span in spans}) == 1
    by_id = {span.span_id: (service, span) for service, span in spans}
    parents = {
        (service, by_id[span.parent_span_id][0])
        for service, span in spans
        if span.parent_span_id in by_id
    }
    assert parents == {
        ("outrider-gateway", "outrider-gateway"),  # the call within the request
        ("outrider-scorer", "outrider-gateway"),
        ("outrider-proposer", "outrider-scorer"),
    }
    (scorer_span,) = [span for service, span in spans if service == "outrider-scorer"]
    attributes = {a.key: a.value for a in scorer_span.attributes}
    assert attributes["gen_ai.usage.output_tokens"].int_value == len(done.token_ids) == 24
    assert sum(event.name == "round" for event in scorer_span.events) >= min(8, done.aux.rounds)
