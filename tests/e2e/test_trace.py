"""One trace per request across three processes, as an OTLP collector sees it."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1 import trace_pb2

from scorer_service.round_spans import MAX_ROUNDS, PARTS
from tests.support.services.options import GenerateOptions
from tests.support.services.up import Completion, complete, running

pytestmark = pytest.mark.timeout(400)

GATEWAY, SCORER, PROPOSER = "outrider-gateway", "outrider-scorer", "outrider-proposer"
SECRET = "xylophone"  # in every prompt
STAGES = ("queue", "prefill", "round", "rounds")

Span = trace_pb2.Span


class Collector(trace_service_pb2_grpc.TraceServiceServicer):  # type: ignore[misc]
    """Keeps what it is sent: (service, span)."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, Span]] = []

    async def Export(  # noqa: N802
        self, request: Any, _context: object
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        for resource in request.resource_spans:
            names = {a.key: a.value.string_value for a in resource.resource.attributes}
            for scope in resource.scope_spans:
                self.spans += [(names["service.name"], span) for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    async def until(self, condition: Callable[[Counter[tuple[str, int]]], bool]) -> None:
        """Waits for spans to come, counted by service and kind."""
        deadline = time.monotonic() + 60
        while not condition(seen := Counter((service, span.kind) for service, span in self.spans)):
            assert time.monotonic() < deadline, f"only {seen}"
            await asyncio.sleep(0.05)


@asynccontextmanager
async def collecting(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Collector]:
    """A collector that the processes started meanwhile export to."""
    collector = Collector()
    server = grpc.aio.server()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "200")
    try:
        yield collector
    finally:
        await server.stop(0)


async def run(pair: tuple[Path, Path], collector: Collector, requests: int) -> list[Completion]:
    """So many requests at once; returns when all that they export has come."""
    stack = running("--model", pair[0], "--draft-model", pair[1])
    try:
        up = await asyncio.to_thread(stack.__enter__)
        done = await asyncio.gather(
            *(
                complete(
                    up.grpc,
                    GenerateOptions(
                        prompt=f"def {SECRET}{n}(",
                        max_tokens=64,
                        ignore_eos=True,
                        temperature=0.0,
                        stop=(f"no {SECRET} in sight",),
                        aux_info=True,
                    ),
                    timeout_s=120,
                )
                for n in range(requests)
            )
        )
        await collector.until(
            lambda seen: (
                seen[GATEWAY, Span.SPAN_KIND_SERVER] == requests
                and seen[SCORER, Span.SPAN_KIND_SERVER] == requests
                and seen[PROPOSER, Span.SPAN_KIND_INTERNAL] >= requests
            )
        )
    finally:
        await asyncio.to_thread(stack.__exit__, None, None, None)
    return done


def seconds(span: Span) -> float:
    return (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9


async def test_requests_at_once_have_one_whole_trace_each(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = 6
    async with collecting(monkeypatch) as collector:
        done = await run(pair, collector, requests)
    traces: dict[bytes, list[tuple[str, Span]]] = defaultdict(list)
    for service, span in collector.spans:
        traces[span.trace_id].append((service, span))
    assert len(traces) == requests

    explained = total = 0.0
    for spans in traces.values():
        by_id = {span.span_id: (service, span) for service, span in spans}
        (root,) = [span for _, span in spans if not span.parent_span_id]
        for _, span in spans:
            assert span is root or span.parent_span_id in by_id, f"{span.name} is an orphan"
        of_kind = Counter(
            (service, by_id[span.parent_span_id][1].name, span.name)
            for service, span in spans
            if span is not root
        )
        call = "outrider.v1.ScorerService/Generate"
        assert of_kind.pop((GATEWAY, root.name, call)) == 1
        assert of_kind.pop((SCORER, call, call)) == 1
        assert of_kind.pop((PROPOSER, call, "proposer.session")) >= 1
        stages = {stage: of_kind.pop((SCORER, call, stage), 0) for stage in STAGES}
        assert stages["queue"] == 1
        assert 0 < stages["round"] <= MAX_ROUNDS
        assert {name for _, parent, name in of_kind if parent == "round"} <= set(PARTS)
        assert {parent for _, parent, _ in of_kind} == {"round"}

        for _, span in spans:
            if span.name == "round":
                parts = [part for _, part in spans if part.parent_span_id == span.span_id]
                assert sum(map(seconds, parts)) == pytest.approx(seconds(span), abs=1e-5)
        explained += sum(
            seconds(span) for service, span in spans if service == SCORER and span.name in STAGES
        )
        total += seconds(root)
    assert explained == pytest.approx(total, rel=0.1), "the rounds add up to the requests"

    servers = [span for service, span in collector.spans if service == SCORER]
    tokens = [
        a.value.int_value for s in servers for a in s.attributes if a.key.endswith("output_tokens")
    ]
    assert tokens == [len(answer.token_ids) for answer in done] == [64] * requests
    everything = b"".join(span.SerializeToString() for _, span in collector.spans)
    assert SECRET.encode() not in everything, "what clients say is nobody's business"
    assert done[0].text.encode() not in everything
