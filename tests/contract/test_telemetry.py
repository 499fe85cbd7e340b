"""One trace per request across services, and the metrics that a dashboard reads."""

from __future__ import annotations

import asyncio
import json
import threading
import urllib.request
from collections.abc import Sequence

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import Counter
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from outrider.errors import ConfigError
from outrider.rpc.exposition import encode
from outrider.rpc.telemetry import METRIC_PREFIX, PastSpan, Telemetry, configure, extract, inject
from tests.contract.test_scorer import PROMPT, greedy_truth
from tests.support.services.scorer import running_scorer
from tests.support.services.scripted_proposer import ScriptedProposer, follow, proposing


async def test_trace_of_a_client_request_leads_through_scorer_to_proposer() -> None:
    client_spans, scorer_spans = InMemorySpanExporter(), InMemorySpanExporter()
    client = configure("client", exporter=client_spans)
    scorer_telemetry = configure("scorer", exporter=scorer_spans)
    async with running_scorer(telemetry=scorer_telemetry) as scorer:
        proposer = ScriptedProposer(scorer.stub, follow(greedy_truth))
        async with proposing(proposer):
            with client.client_span("outrider.v1.ScorerService/Generate") as span:
                output = await scorer.generate(PROMPT, metadata=inject(span))
    client.shutdown()
    (theirs,) = client_spans.get_finished_spans()
    (ours,) = [s for s in scorer_spans.get_finished_spans() if s.kind is trace.SpanKind.SERVER]
    assert ours.context.trace_id == theirs.context.trace_id
    assert ours.parent is not None
    assert ours.parent.span_id == theirs.context.span_id
    assert (theirs.kind, ours.kind) == (trace.SpanKind.CLIENT, trace.SpanKind.SERVER)
    assert ours.attributes is not None
    assert ours.attributes["gen_ai.usage.output_tokens"] == 40
    assert ours.attributes["outrider.accepted"] == output.aux_info.accepted
    opened = trace.get_current_span(
        extract((("traceparent", proposer.opens[0].traceparent),))
    ).get_span_context()
    assert opened.trace_id == ours.context.trace_id
    assert opened.span_id == ours.context.span_id


def test_trace_when_not_sampled_costs_no_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    spans = InMemorySpanExporter()

    async def request() -> None:
        async with running_scorer(telemetry=configure("scorer", exporter=spans)) as scorer:
            call = asyncio.create_task(scorer.generate(PROMPT, max_tokens=400))
            await scorer.until(lambda: bool(scorer.hub._sessions), "running")
            (session,) = scorer.hub._sessions.values()
            assert session.rounds is None
            await call

    asyncio.run(request())
    assert spans.get_finished_spans() == ()


def test_telemetry_with_ended_spans_records_them_like_started_ones() -> None:
    spans = InMemorySpanExporter()
    telemetry = configure("scorer", exporter=spans)
    caller = extract((("traceparent", "00-" + "a" * 32 + "-" + "b" * 16 + "-01"),))
    parent = telemetry.tracer.start_span("request", caller)
    started = telemetry.tracer.start_span(
        "part", trace.set_span_in_context(parent), attributes={"n": 1}, start_time=10
    )
    started.end(20)
    inner = PastSpan("inner", 12, 15)
    telemetry.record(parent, [PastSpan("part", 10, 20, {"n": 1}, (inner,))])
    parent.end()
    telemetry.record(parent, [PastSpan("late", 10, 20)])
    (first, second, below, request) = spans.get_finished_spans()

    def fields_of(span: ReadableSpan) -> dict[str, object]:
        fields: dict[str, object] = json.loads(span.to_json())
        context = fields["context"]
        assert isinstance(context, dict)
        assert len(context.pop("span_id")) == len("0x") + 16
        return fields | {"scope": span.instrumentation_scope, "flags": span.context.trace_flags}

    assert fields_of(second) == fields_of(first)
    assert below.parent == second.context
    assert second.parent == first.parent == request.context
    assert len({span.context.span_id for span in (first, second, below, request)}) == 4


@pytest.mark.parametrize("flags", ["00", "01"])
def test_telemetry_with_ended_span_records_it_only_if_its_parent_is(flags: str) -> None:
    spans = InMemorySpanExporter()
    recorded, deaf = configure("scorer", exporter=spans), configure("scorer")
    caller = extract((("traceparent", "00-" + "a" * 32 + "-" + "b" * 16 + "-" + flags),))
    for telemetry in (recorded, deaf):
        telemetry.record(telemetry.tracer.start_span("request", caller), [PastSpan("part", 1, 2)])
    assert [span.name for span in spans.get_finished_spans()] == ["part"] * int(flags)


class _OutOfReach(SpanExporter):
    """Tries until it is shut down, as OTLP's does for much longer than a pod has to end."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        self.gave_up = False

    def export(self, _spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.gave_up = not self._ended.wait(20)
        return SpanExportResult.FAILURE

    def shutdown(self) -> None:
        self._ended.set()


def test_telemetry_with_collector_out_of_reach_does_not_delay_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("outrider.rpc.telemetry._FLUSH_S", 0.05)
    exporter = _OutOfReach()
    telemetry = Telemetry("scorer", exporter, batch=True)
    with telemetry.server_span("request", None):
        pass
    telemetry.shutdown()
    assert not exporter.gave_up


async def test_telemetry_of_failed_request_is_an_error_span() -> None:
    spans = InMemorySpanExporter()
    async with running_scorer(telemetry=configure("scorer", exporter=spans)) as scorer:
        with pytest.raises(Exception, match="at least one token"):
            await scorer.generate([])
    (span,) = spans.get_finished_spans()
    assert span.status.status_code is trace.StatusCode.ERROR


async def test_telemetry_without_exporter_passes_a_callers_trace_through() -> None:
    async with running_scorer() as scorer:
        proposer = ScriptedProposer(scorer.stub, follow(greedy_truth))
        async with proposing(proposer):
            parent = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"
            await scorer.generate(PROMPT, metadata=(("traceparent", parent),))
            assert proposer.opens[0].traceparent == parent
            await scorer.generate(PROMPT, metadata=(("traceparent", "garbage"),))
            assert proposer.opens[1].traceparent == ""


def fetch(url: str, accept: str = "text/plain") -> str:
    request = urllib.request.Request(url, headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=5) as answer:
        text: str = answer.read().decode()
        return text


async def test_metrics_when_scraped_have_vllms_names_and_descriptions() -> None:
    telemetry = configure("scorer")
    url = telemetry.serve_metrics("127.0.0.1", 0)
    second = configure("second")
    with pytest.raises(ConfigError, match="port"):
        second.serve_metrics("127.0.0.1", int(url.split(":")[2].split("/")[0]))
    second.shutdown()
    async with running_scorer(telemetry=telemetry) as scorer:
        proposer = ScriptedProposer(scorer.stub, follow(greedy_truth))
        async with proposing(proposer):
            output = await scorer.generate(PROMPT)
            text = await asyncio.to_thread(fetch, url)
    lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    label = '{model_name="default"}'
    accepted = float(lines[f"outrider:spec_decode_num_accepted_tokens_total{label}"])
    assert accepted == output.aux_info.accepted > 0
    assert float(lines[f"outrider:generation_tokens_total{label}"]) == 40
    attached = 'outrider:proposers_attached{method="draft_model",model_name="default",pool="test"}'
    assert float(lines[attached]) == 1
    of_pool = 'outrider:pool_accepted_tokens_total{model_name="default",pool="test"}'
    assert float(lines[of_pool]) == accepted
    aux = output.aux_info
    for fate, rounds in (("hit", aux.hits), ("late", aux.misses_late), ("wrong", aux.misses_wrong)):
        of_fate = f'outrider:pool_rounds_total{{fate="{fate}",model_name="default",pool="test"}}'
        assert float(lines[of_fate]) == rounds
    for k, rounds in enumerate(aux.k_histogram[1:], start=1):
        by_k = 'outrider:spec_decode_num_rounds_total{model_name="default",num_draft_tokens="%d"}'
        assert float(lines.get(by_k % k, "0")) == rounds
    steps = float(lines['outrider:step_time_seconds_count{model_name="default",part="forward"}'])
    assert steps == output.aux_info.iter_count
    names = {line.split("{")[0] for line in lines}
    for histogram in ("request_duration", "time_to_first_token", "time_per_output_token"):
        assert f"gen_ai_server_{histogram}_seconds_count" in names
    described = {line.split()[2] for line in text.splitlines() if line.startswith("# HELP")}
    undescribed = {
        name
        for name in names
        if not any(name.startswith(known.removesuffix("_total")) for known in described)
    }
    assert undescribed == set()


async def test_latencies_of_traced_request_have_its_trace_as_exemplar() -> None:
    spans = InMemorySpanExporter()
    telemetry = configure("scorer", exporter=spans)
    url = telemetry.serve_metrics("127.0.0.1", 0)
    async with running_scorer(telemetry=telemetry) as scorer:
        await scorer.generate(PROMPT)
        text = await asyncio.to_thread(fetch, url, "application/openmetrics-text")
    (span,) = [s for s in spans.get_finished_spans() if s.kind is trace.SpanKind.SERVER]
    exemplars = {
        family.name: sample.exemplar.labels
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.exemplar is not None
    }
    wanted = {
        "trace_id": trace.format_trace_id(span.context.trace_id),
        "span_id": trace.format_span_id(span.context.span_id),
    }
    histograms = ("request_duration", "time_to_first_token", "time_per_output_token")
    assert exemplars == {f"gen_ai_server_{name}_seconds": wanted for name in histograms}


def test_metrics_in_both_formats_have_the_same_names() -> None:
    """Prometheus asks for OpenMetrics, a reader of the page for text."""
    telemetry = configure("scorer")
    Counter(f"{METRIC_PREFIX}things", "Things.", registry=telemetry.registry)
    text, _ = encode(telemetry.registry, "")
    openmetrics, _ = encode(telemetry.registry, "application/openmetrics-text;version=1.0.0")
    for page in (text, openmetrics):
        assert b"\noutrider:things_total 0.0\n" in page


async def test_latencies_of_untraced_request_have_no_exemplar() -> None:
    telemetry = configure("scorer")
    async with running_scorer(telemetry=telemetry) as scorer:
        parent = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"  # recorded by the caller only
        await scorer.generate(PROMPT, metadata=(("traceparent", parent),))
        text, content_type = encode(telemetry.registry, "application/openmetrics-text")
    assert content_type.startswith("application/openmetrics-text")
    assert b"gen_ai_server_request_duration_seconds_count" in text
    assert b"trace_id" not in text
