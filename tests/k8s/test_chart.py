"""The chart with each example: linted, rendered as reviewed, valid, and within policy."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import yaml

from k8s import chart_readme
from tests.support.kubernetes import helm

RENDERED = helm.EXAMPLES / "rendered"
NAMES = sorted(path.stem for path in helm.EXAMPLES.glob("*.yaml"))
VERSIONS = [f"1.{minor}" for minor in range(30, 38)]
# Kinds of others, for which there are no schemas here.
CUSTOM = {
    *("Certificate", "GRPCRoute", "HTTPRoute", "InferencePool", "LeaderWorkerSet"),
    *("PrometheusRule", "ScaledObject", "ServiceMonitor"),
}
NOT_IN_EXAMPLES = (
    "gateway.autoscaling.enabled=true",
    "monitoring.serviceMonitor.enabled=true",
    "monitoring.dashboards.enabled=true",
    "gateway.service.type=LoadBalancer",
    "proposers.draft.autoscaling.enabled=true",
    "proposers.draft.method=suffix",
    "proposers.beside.placement=sidecar",
    "proposers.beside.model=org/draft",
    "proposers.module.method=eagle3\\,ngram",
    "proposers.module.model=org/module",
    "model.name=/models/target",
    "model.cache.tokenSecret=hub",
    "model.volume.hostPath.path=/models",
    "tls.enabled=true",
    "tls.secretName=tls",
    "networkPolicy.extraEgress[0].ports[0].port=8443",
    "scorer.scheduling.priorityClassName=high",
    f"image.digests.cpu=sha256:{'0' * 64}",
    "image.pullSecrets[0]=registry",
    "serviceAccount.create=true",
    "otel.endpoint=https://collector:4317",
    "otel.env[0].name=OTEL_EXPORTER_OTLP_COMPRESSION",
    "otel.env[0].value=gzip",
)


@pytest.fixture(scope="module")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with each example rendered now."""
    folder = tmp_path_factory.mktemp("rendered")
    environment = os.environ | {"HELM": str(helm.tool("helm"))}
    subprocess.run([helm.ROOT / "k8s/render.sh", folder], check=True, env=environment, timeout=60)
    return folder


def test_chart_with_each_example_lints() -> None:
    for name in NAMES:
        done = helm.call(
            "helm", "lint", "--strict", helm.CHART, "--values", helm.EXAMPLES / f"{name}.yaml"
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_chart_with_each_example_renders_what_was_reviewed(rendered: Path) -> None:
    assert sorted(path.stem for path in RENDERED.iterdir()) == NAMES
    for name in NAMES:
        now, reviewed = ((folder / f"{name}.yaml").read_text() for folder in (rendered, RENDERED))
        assert now == reviewed, (
            f"{name} renders differently: run k8s/render.sh, and look at the difference"
        )


def test_manifests_of_each_example_fit_the_schemas_of_every_version(rendered: Path) -> None:
    more = rendered / "more.txt"
    done = helm.template(*NOT_IN_EXAMPLES)
    assert done.returncode == 0, done.stderr
    more.write_text(done.stdout)
    files = [*(rendered / f"{name}.yaml" for name in NAMES), more]
    done = helm.validate(VERSIONS, *files)
    assert done.returncode == 0, done.stdout + done.stderr
    validated = {line.partition(":")[0] for line in done.stdout.splitlines()}
    kinds = {m["kind"] for file in files for m in helm.parse(file.read_text())}
    assert kinds - validated == CUSTOM & kinds


def test_kubernetes_validate_agrees(rendered: Path) -> None:
    done = helm.call("kubernetes-validate", "-k", "1.37", "--strict", rendered / "kind.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (done.stdout + done.stderr).count("passed") > 8


def test_readme_of_chart_has_every_value() -> None:
    written = (helm.CHART / "README.md").read_text()
    assert written == chart_readme.readme(), "run k8s/render.sh"
    values = yaml.safe_load((helm.CHART / "values.yaml").read_text())
    for name, value in values.items():
        keys = value if isinstance(value, dict) and name not in ("proposers",) else ()
        assert f"| `{name}" in written
        assert [
            key for key in keys if f"`{name}.{key}`" not in written and key not in written
        ] == []


@pytest.mark.timeout(300)  # checkov needs 9 s of a core
def test_manifests_of_each_example_pass_policy() -> None:
    # One run for both: most of its time is its start.
    files = ["Dockerfile", *RENDERED.glob("*.yaml")]
    done = helm.call("checkov", "--config-file", "k8s/checkov.yaml", "-o", "json", "-f", *files)
    assert done.returncode == 0, done.stdout + done.stderr
    reports = {report["check_type"]: report["summary"] for report in json.loads(done.stdout)}
    for kind in ("kubernetes", "dockerfile"):
        assert reports[kind]["passed"] > 100
        assert reports[kind]["failed"] == reports[kind]["parsing_errors"] == 0
