"""Autoscalers ask for metrics that exist; docs/operations.md lists those, as an e2e test proves."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from tests.support.kubernetes import helm
from tests.support.kubernetes.promql import selectors

ALL = (
    "gateway.autoscaling.enabled=true",
    "scorer.autoscaling.enabled=true",
    "proposers.draft.autoscaling.enabled=true",
    "monitoring.serviceMonitor.enabled=true",
)
SCALED = {"outrider-gateway", "outrider-scorer", "outrider-proposer-draft"}
EXPORTED = set(re.findall(r"`(outrider:\w+)`", (helm.ROOT / "docs/operations.md").read_text()))


def is_exported(series: str) -> bool:
    return series in EXPORTED or re.sub("_(total|sum|count)$", "", series) in EXPORTED


def check_query(query: str, jobs: set[str]) -> None:
    """It reads series that are exported, of jobs that the ServiceMonitor scrapes."""
    read = selectors(query)
    assert read
    for selector in read:
        assert is_exported(selector.metric)
        labels = {matcher.label: matcher.value for matcher in selector.matchers}
        assert labels["namespace"] == "llm"
        assert labels["job"] in jobs
        assert labels.get("pool", "draft") == "draft"


def jobs_of(manifests: list[helm.Manifest]) -> set[str]:
    (monitor,) = (m["spec"] for m in manifests if m["kind"] == "ServiceMonitor")
    services = [m["metadata"]["labels"] for m in manifests if m["kind"] == "Service"]
    return {labels[monitor["jobLabel"]] for labels in services if monitor["jobLabel"] in labels}


def test_keda_queries_name_exported_metrics_of_scraped_jobs() -> None:
    manifests = helm.render(*ALL, "autoscaling.engine=keda")
    scaled = [m for m in manifests if m["kind"] == "ScaledObject"]
    assert {m["metadata"]["name"] for m in scaled} == SCALED
    for trigger in (trigger for m in scaled for trigger in m["spec"]["triggers"]):
        check_query(trigger["metadata"]["query"], jobs_of(manifests))
        assert trigger["metricType"] == "AverageValue"  # else KEDA has no fallback
        assert float(trigger["metadata"]["threshold"]) > 0


def test_horizontal_autoscalers_ask_for_what_rules_record_and_the_adapter_gives() -> None:
    manifests = helm.render(*ALL)
    (adapter,) = yaml.safe_load((helm.ROOT / "k8s/prometheus-adapter.yaml").read_text())["rules"][
        "external"
    ]
    rules = helm.only(manifests, "PrometheusRule", "outrider-autoscaling")["spec"]["groups"][0]
    recorded = set()
    for rule in rules["rules"]:
        assert rule["record"] == adapter["seriesQuery"].partition("{")[0]
        check_query(rule["expr"], jobs_of(manifests))
        assert rule["labels"]["namespace"] == "llm"
        recorded.add((rule["labels"]["scaler"], rule["labels"]["signal"]))
    scaled = [m for m in manifests if m["kind"] == "HorizontalPodAutoscaler"]
    assert {m["metadata"]["name"] for m in scaled} == SCALED
    asked = set()
    for scaler in scaled:
        for metric in scaler["spec"]["metrics"]:
            wanted = metric["external"]["metric"]
            assert wanted["name"] == adapter["name"]["as"]
            labels = wanted["selector"]["matchLabels"]
            assert labels["scaler"] == scaler["metadata"]["name"]
            asked.add((labels["scaler"], labels["signal"]))
    assert asked == recorded


@pytest.mark.parametrize(("most", "target"), [(None, "96"), (64, "48"), (3, "3")])
def test_scorers_without_a_target_grow_at_three_quarters_of_their_batch(
    most: int | None, target: str
) -> None:
    sets = () if most is None else (f"scorer.flags.max-num-seqs={most}",)
    spec = helm.only(helm.render(*ALL, *sets), "HorizontalPodAutoscaler", "outrider-scorer")["spec"]
    targets = {
        metric["external"]["metric"]["selector"]["matchLabels"]["signal"]: metric["external"][
            "target"
        ]["averageValue"]
        for metric in spec["metrics"]
    }
    assert targets == {"requests": target, "open": target, "kv": "0.85"}


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
        metrics = {name for name in ports if name.startswith("metrics")}
        assert metrics == scraped & ports
        assert not metrics & ports or not {"http"} & ports  # none where clients are


def test_alerts_follow_the_objectives_of_the_values(tmp_path: Path) -> None:
    values = tmp_path / "values.yaml"
    rules = {"enabled": True, "errorBudget": 0.01, "ttftSeconds": 2.5}
    values.write_text(yaml.safe_dump({"monitoring": {"rules": rules}}))
    said = helm.template(values=values).stdout
    assert said.count("14.4 * 0.01\n") == 2
    assert said.count(" 6 * 0.01\n") == 2
    assert "* 0.001" not in said
    assert ") > 2.5\n" in said
    refused = helm.template("monitoring.rules.errorBudget=0")
    assert refused.returncode != 0
    assert "errorBudget" in refused.stderr


def test_alerts_when_rendered_are_of_their_release_alone() -> None:
    rules = helm.only(helm.render("monitoring.rules.enabled=true"), "PrometheusRule", "outrider")
    file = yaml.safe_load((helm.CHART / "files/alerts.yaml").read_text())
    linked = helm.template(
        "monitoring.rules.enabled=true", "monitoring.rules.runbooks=https://wiki.example/runbooks"
    )
    assert "runbook_url: https://wiki.example/runbooks#outridernoscorer" in linked.stdout
    assert "runbook_url: docs/" not in linked.stdout
    jobs = 'namespace="llm",job=~"outrider-(gateway|scorer|proposer-.+)"'
    for group, same in zip(rules["spec"]["groups"], file["groups"], strict=True):
        for rule, written in zip(group["rules"], same["rules"], strict=True):
            assert rule == written | {"expr": written["expr"].replace('job=~".*"', jobs)}
            for selector in selectors(rule["expr"]):
                found = {matcher.label: matcher.value for matcher in selector.matchers}
                assert found["namespace"] == "llm", rule
                assert re.fullmatch(found["job"], "outrider-proposer-draft")
                assert not re.fullmatch(found["job"], "outrider-b-scorer")


def test_dashboards_when_enabled_are_config_maps_that_grafana_finds() -> None:
    rendered = helm.render("monitoring.dashboards.enabled=true")
    maps = [m for m in rendered if m["kind"] == "ConfigMap"]
    files = {path.name: path.read_text() for path in helm.CHART.glob("files/dashboards/*.json")}
    held = {name: text for config in maps for name, text in config["data"].items()}
    assert {name: json.loads(text) for name, text in held.items()} == {
        name: json.loads(text) for name, text in files.items()
    }
    for config in maps:
        assert config["metadata"]["labels"]["grafana_dashboard"] == "1"
