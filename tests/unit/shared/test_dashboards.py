"""Dashboards and alerts as files; tests/e2e/test_metrics.py holds them against running services."""

from __future__ import annotations

import json
import re
from collections import Counter

import pytest

from k8s.dashboards.__main__ import rendered
from tests.support.kubernetes.promql import (
    DASHBOARDS,
    PANELS,
    ROOT,
    dashboard_queries,
    rule_queries,
    rules,
    selectors,
)

ALERTS = [rule for rule in rules() if "alert" in rule]


def test_dashboards_in_the_repository_equal_the_generated_ones() -> None:
    committed = {path.name: path.read_text() for path in PANELS.glob("*.json")}
    assert committed == rendered(), "run `make dashboards`"


@pytest.mark.parametrize("name", rendered())
def test_dashboard_panels_do_not_overlap(name: str) -> None:
    cells: Counter[tuple[int, int]] = Counter()
    for panel in json.loads(rendered()[name])["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        cells.update((x, y) for x in range(at["x"], at["x"] + at["w"])
                     for y in range(at["y"], at["y"] + at["h"]))  # fmt: skip
    assert max(cells.values()) == 1


def test_dashboard_queries_are_valid_promql() -> None:
    queries = dashboard_queries() + rule_queries()
    assert len(queries) > 70
    for query in queries:
        read = selectors(query.expr)
        assert read, query
        for selector in read:
            assert selector.metric.startswith(("outrider:", "gen_ai_server_")), query


def test_dashboards_of_all_services_show_every_metric() -> None:
    text = (ROOT / "docs/operations.md").read_text()  # it has them all: tests/e2e/test_metrics.py
    metrics = re.findall(r"`((?:outrider:|gen_ai_)\w+)`", text)
    shown = {selector.metric for query in dashboard_queries() for selector in selectors(query.expr)}
    suffixes = ("", "_total", "_bucket", "_sum")
    assert len(metrics) > 40
    assert [m for m in metrics if not shown & {m + suffix for suffix in suffixes}] == []


def test_dashboards_choose_release_and_job() -> None:
    for text in rendered().values():
        names = [variable["name"] for variable in json.loads(text)["templating"]["list"]]
        assert {"datasource", "namespace", "release", "job", "model"} <= set(names)
    for query in dashboard_queries():
        for selector in selectors(query.expr):
            labels = {matcher.label for matcher in selector.matchers}
            assert {"namespace", "app_kubernetes_io_instance", "job"} <= labels, query


def test_dashboard_of_latency_shows_traces_of_both_sources() -> None:
    panels = json.loads(rendered()["latency.json"])["panels"]
    queries = {
        panel["datasource"]["type"]: (panel["datasource"]["uid"], panel["targets"][0])
        for panel in panels
        if panel["type"] == "table"
    }
    uid, query = queries["tempo"]
    assert (uid, query["queryType"]) == ("${tempo}", "traceql")
    assert query["query"] == '{resource.service.name="outrider-gateway"}'
    uid, query = queries["jaeger"]
    assert (uid, query["queryType"]) == ("${jaeger}", "search")
    assert query["service"] == "outrider-gateway"


def test_dashboard_panels_have_descriptions() -> None:
    for path in PANELS.glob("*.json"):
        for panel in json.loads(path.read_text())["panels"]:
            if panel["type"] != "row":
                assert panel["description"], f"{path.name}: {panel['title']}"


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert["alert"])
def test_alerts_have_a_runbook_and_a_test(alert: dict[str, object]) -> None:
    name, annotations = alert["alert"], alert["annotations"]
    assert isinstance(name, str)
    assert isinstance(annotations, dict)
    assert annotations["runbook_url"] == f"docs/runbooks.md#{name.lower()}"
    headings = re.findall(r"^## (.*)$", (ROOT / "docs/runbooks.md").read_text(), re.MULTILINE)
    assert name in headings
    assert name in (DASHBOARDS / "alerts_test.yaml").read_text()
    assert alert["labels"] in ({"severity": "ticket"}, {"severity": "page"})


def test_runbooks_of_the_documentation_belong_to_an_alert() -> None:
    headings = re.findall(r"^## (.*)$", (ROOT / "docs/runbooks.md").read_text(), re.MULTILINE)
    assert headings == [alert["alert"] for alert in ALERTS]
