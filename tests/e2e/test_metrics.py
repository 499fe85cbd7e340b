"""What dashboards and alerts ask for is what running services export."""

from __future__ import annotations

import asyncio
import re
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from outrider import errors
from tests.support.kubernetes.promql import (
    ROOT,
    Query,
    Selector,
    aggregations,
    dashboard_queries,
    rule_queries,
    rules,
    selectors,
)
from tests.support.services.options import GenerateOptions
from tests.support.services.up import Up, complete

pytestmark = pytest.mark.timeout(400)

ADDED_BY_PROMETHEUS = {  # the last two by a ServiceMonitor
    *("instance", "job", "namespace", "app_kubernetes_io_instance"),
}
RECORDED = {rule["record"] for rule in rules() if "record" in rule} | {"outrider:autoscaling"}
REASONS = {
    error.reason
    for error in vars(errors).values()
    if isinstance(error, type) and issubclass(error, errors.OutriderError)
}


@dataclass(frozen=True)
class Scrape:
    """What the three services of a stack export."""

    families: dict[str, str]  # name, without the suffixes of samples -> description
    labels: dict[str, list[dict[str, str]]]  # name of a sample -> labels of its series


@pytest.fixture(scope="module")
def scrape(draft_model_stack: Up) -> Scrape:
    """After a request that was drafted for."""
    options = GenerateOptions(
        prompt="def f(", max_tokens=48, ignore_eos=True, temperature=0.0, aux_info=True
    )
    asyncio.run(complete(draft_model_stack.grpc, options))
    urls = re.findall(r"metrics of the \w+: (http\S+)", "".join(draft_model_stack.log))
    assert len(urls) == 3
    families: dict[str, str] = {}
    labels: dict[str, list[dict[str, str]]] = {}
    accepted = 0.0
    for url in urls:
        request = urllib.request.Request(url, headers={"Accept": "application/openmetrics-text"})
        with urllib.request.urlopen(request, timeout=10) as answer:
            text = answer.read().decode()
        for family in text_string_to_metric_families(text):
            families[family.name] = family.documentation
            for sample in family.samples:
                labels.setdefault(sample.name, []).append(sample.labels)
                if sample.name == "outrider:spec_decode_num_accepted_tokens_total":
                    accepted += sample.value
    assert accepted > 0
    return Scrape(families, labels)


def test_metrics_of_every_service_are_described_and_documented(scrape: Scrape) -> None:
    documented = set(
        re.findall(r"`((?:outrider:|gen_ai_)\w+)`", (ROOT / "docs/operations.md").read_text())
    )
    assert {name for name, text in scrape.families.items() if not text} == set()
    assert set(scrape.families) == documented


def test_queries_of_dashboards_find_their_series(scrape: Scrape) -> None:
    problems = [
        f"{query.where}: {problem}"
        for query in dashboard_queries() + rule_queries()
        for problem in problems_of(query, scrape)
    ]
    assert problems == []


def test_metrics_named_by_chart_are_exported(scrape: Scrape) -> None:
    """Autoscalers' queries, too, which are templates and no PromQL yet."""
    named: dict[str, Path] = {}
    for path in (ROOT / "k8s").rglob("*.yaml"):
        named |= dict.fromkeys(re.findall(r"\boutrider:[a-z][\w:]*", path.read_text()), path)
    assert len(named) > 10
    unknown = named.keys() - scrape.labels.keys() - RECORDED
    assert {name: str(named[name]) for name in unknown} == {}


def problems_of(query: Query, scrape: Scrape) -> Iterator[str]:
    for selector in selectors(query.expr):
        if selector.metric not in RECORDED and not exported(selector, scrape):
            yield f"nobody exports {selector}"
    for kept, read in aggregations(query.expr):
        for selector in read:
            known = set(chain.from_iterable(scrape.labels.get(selector.metric, ())))
            if not kept <= known | ADDED_BY_PROMETHEUS:
                yield f"{selector.metric} has no {kept - known}"


def exported(selector: Selector, scrape: Scrape) -> bool:
    """Whether some series fits. No request failed: of outcomes only the names are looked at."""
    outcomes = [m for m in selector.matchers if m.label == "outcome"]
    rest = [m for m in selector.matchers if m.label != "outcome"]
    return all(set(m.value.split("|")) <= REASONS for m in outcomes) and any(
        {m.label for m in selector.matchers} <= labels.keys() | ADDED_BY_PROMETHEUS
        and all(m.accepts(labels.get(m.label, "")) for m in rest)
        for labels in scrape.labels.get(selector.metric, ())
    )
