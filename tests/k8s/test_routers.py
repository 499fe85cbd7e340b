"""Other people's routers in front of the gateways: what they look for is there."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry

from gateway.admission import Admission
from gateway.metrics import GatewayMetrics
from gateway.routing.scorer_load import ScorerLoad
from outrider.v1 import scorer_pb2
from tests.support.kubernetes import helm

EXTENSION = helm.EXAMPLES / "inference-extension.yaml"
STACK = helm.EXAMPLES / "production-stack-router.yaml"
RUNTIME = helm.ROOT / "k8s/kserve/serving-runtime.yaml"


class _OneScorer:
    """A pool of one, without a connection."""

    def __init__(self) -> None:
        self.info = scorer_pb2.GetScorerInfoResponse(total_pages=10, free_pages=5, page_size=16)
        self.in_flight = 0
        self.scorers = self.serving = (self,)


def vllm_names() -> set[str]:
    """Names of the series on the gateways' HTTP port."""
    admission = Admission(1, GatewayMetrics(CollectorRegistry()))
    load: Any = ScorerLoad(_OneScorer(), admission)  # type: ignore[arg-type]
    return {metric.name for metric in load.metrics("vllm:", "m")}


def gateway_pod(manifests: list[helm.Manifest]) -> dict[str, Any]:
    found: dict[str, Any] = helm.only(manifests, "Deployment", "outrider-gateway")["spec"][
        "template"
    ]
    return found


def test_inference_pool_selects_gateways_at_their_port() -> None:
    manifests = helm.render(values=EXTENSION)
    pool = helm.only(manifests, "InferencePool", "outrider")
    labels = pool["spec"]["selector"]["matchLabels"]
    chosen = [
        workload["metadata"]["name"]
        for workload in helm.workloads(manifests)
        if labels.items() <= workload["spec"]["template"]["metadata"]["labels"].items()
    ]
    assert chosen == ["outrider-gateway"]
    (container,) = gateway_pod(manifests)["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert pool["spec"]["targetPorts"] == [{"number": ports["http"]}]
    assert "--vllm-metrics" in container["args"]
    route = helm.only(manifests, "HTTPRoute", "outrider")["spec"]
    (backend,) = route["rules"][0]["backendRefs"]
    assert (backend["kind"], backend["name"]) == ("InferencePool", pool["metadata"]["name"])
    assert pool["apiVersion"] == f"{backend['group']}/v1"


def test_endpoint_picker_reads_metrics_that_gateways_show() -> None:
    config = helm.only(helm.render(values=EXTENSION), "ConfigMap", "outrider-epp")["data"]
    picker = yaml.safe_load(config["epp.yaml"])
    plugins = {plugin["type"]: plugin for plugin in picker["plugins"]}
    parameters = plugins["core-metrics-extractor"]["parameters"]
    (engine,) = parameters["engineConfigs"]
    assert engine.pop("name") == parameters["defaultEngine"]
    assert set(engine.values()) == vllm_names()
    profile = {entry["pluginRef"] for entry in picker["schedulingProfiles"][0]["plugins"]}
    assert profile < plugins.keys()


def test_router_of_production_stack_finds_gateways_by_its_label() -> None:
    pod = gateway_pod(helm.render(values=STACK))
    assert pod["metadata"]["labels"]["environment"] == "router"
    assert "--vllm-metrics" in pod["spec"]["containers"][0]["args"]
    assert {"vllm:num_requests_running", "vllm:num_requests_waiting"} <= vllm_names()


@pytest.fixture(scope="module")
def runtime() -> dict[str, Any]:
    """The container of KServe's runtime."""
    (found,) = yaml.safe_load(RUNTIME.read_text())["spec"]["containers"]
    assert isinstance(found, dict)
    return found


def test_runtime_of_kserve_is_accepted_by_the_command(runtime: dict[str, Any]) -> None:
    args = [
        arg.replace("/mnt/models", "embedded").replace("{{.Name}}", "m") for arg in runtime["args"]
    ]
    command = [*runtime["command"][1:], *args, "--device=cpu", "--dry-run"]
    done = subprocess.run(
        [sys.executable, "-m", "outrider.cli", *command], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    gateway = next(line for line in done.stdout.splitlines() if line.startswith("gateway: "))
    assert "--http-port 8000" in gateway
    assert "--served-model-name m" in gateway
    for probe in ("startupProbe", "readinessProbe"):
        assert runtime[probe]["httpGet"] == {"path": "/health", "port": 8000}


def test_runtime_of_kserve_is_a_valid_container() -> None:
    done = helm.validate(["1.30", "1.37"], RUNTIME)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Pod: 2" in done.stdout
