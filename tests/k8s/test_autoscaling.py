"""Autoscalers ask for metrics that exist; docs/operations.md lists those, as an e2e test proves."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from tests.support.kubernetes import helm
from tests.support.kubernetes.promql import selectors

ALL = (
    "gateway.autoscaling.enabled=true",
    "scorer.autoscaling.enabled=true",
    "proposers.draft.autoscaling.enabled=true",
)
SCALED = {"outrider-gateway", "outrider-scorer", "outrider-proposer-draft"}
EXPORTED = set(re.findall(r"`(outrider:\w+)`", (helm.ROOT / "docs/operations.md").read_text()))


def is_exported(series: str) -> bool:
    return series in EXPORTED or re.sub("_(total|sum|count)$", "", series) in EXPORTED


def adapter_rules() -> list[dict[str, Any]]:
    rules = yaml.safe_load((helm.ROOT / "k8s/prometheus-adapter.yaml").read_text())["rules"]
    return [*rules["custom"], *rules["external"]]


def test_keda_queries_name_exported_metrics_of_rendered_services() -> None:
    manifests = helm.render(*ALL, "autoscaling.engine=keda")
    services = {m["metadata"]["name"] for m in manifests if m["kind"] == "Service"}
    scaled = [m for m in manifests if m["kind"] == "ScaledObject"]
    assert {m["metadata"]["name"] for m in scaled} == SCALED
    for trigger in (trigger for m in scaled for trigger in m["spec"]["triggers"]):
        for selector in selectors(trigger["metadata"]["query"]):
            assert is_exported(selector.metric)
            labels = {matcher.label: matcher.value for matcher in selector.matchers}
            assert labels["namespace"] == "llm"
            assert labels["service"] in services
            assert labels.get("pool", "draft") == "draft"
        assert float(trigger["metadata"]["threshold"]) > 0


def test_horizontal_autoscalers_name_metrics_of_the_adapter() -> None:
    given = {rule["name"]["as"] for rule in adapter_rules()}
    manifests = helm.render(*ALL)
    scaled = [m for m in manifests if m["kind"] == "HorizontalPodAutoscaler"]
    assert {m["metadata"]["name"] for m in scaled} == SCALED
    asked = {
        metric[metric["type"].lower()]["metric"]["name"]
        for scaler in scaled
        for metric in scaler["spec"]["metrics"]
    }
    assert asked == given
    (late,) = (
        metric["external"]["metric"]["selector"]["matchLabels"]
        for metric in helm.only(manifests, "HorizontalPodAutoscaler", "outrider-proposer-draft")[
            "spec"
        ]["metrics"]
        if metric["type"] == "External"
    )
    assert late == {"namespace": "llm", "service": "outrider-scorer", "pool": "draft"}


@pytest.mark.parametrize("rule", adapter_rules(), ids=lambda rule: rule["name"]["as"])
def test_adapter_queries_name_exported_metrics(rule: dict[str, Any]) -> None:
    series = rule["seriesQuery"].partition("{")[0]
    query = (
        rule["metricsQuery"]
        .replace("<<.Series>>", series)
        .replace("<<.LabelMatchers>>", 'namespace="llm"')
        .replace("<<.GroupBy>>", "namespace")
    )
    read = selectors(query) + selectors(rule["seriesQuery"])
    assert len(read) > 1
    for selector in read:
        assert is_exported(selector.metric)


def test_workloads_when_autoscaled_set_no_replicas() -> None:
    for workload in helm.workloads(helm.render(*ALL)):
        assert "replicas" not in workload["spec"]


def test_metrics_ports_of_every_service_are_scraped() -> None:
    manifests = helm.render(
        "monitoring.serviceMonitor.enabled=true", "proposers.lookup.placement=sidecar"
    )
    monitors = [m["spec"] for m in manifests if m["kind"] == "ServiceMonitor"]
    for service in (m for m in manifests if m["kind"] == "Service"):
        labels = service["metadata"]["labels"].items()
        scraped = {
            endpoint["port"]
            for monitor in monitors
            if monitor["selector"]["matchLabels"].items() <= labels
            for endpoint in monitor["endpoints"]
        }
        ports = {port["name"] for port in service["spec"]["ports"]}
        metrics = {name for name in ports if name.startswith("metrics")} or {"http"}
        assert metrics == scraped & ports


def test_alerts_when_rendered_equal_the_file() -> None:
    rules = helm.only(helm.render("monitoring.rules.enabled=true"), "PrometheusRule", "outrider")
    assert rules["spec"] == yaml.safe_load((helm.CHART / "files/alerts.yaml").read_text())
