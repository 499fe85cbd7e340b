"""Upgrades of a release whose cluster helm can ask: what they keep, and what they refuse."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.support.kubernetes import helm
from tests.support.kubernetes.api_server import cluster_with

SCALED = (
    "gateway.autoscaling.enabled=true",
    "scorer.autoscaling.enabled=true",
    "proposers.draft.autoscaling.enabled=true",
    "monitoring.serviceMonitor.enabled=true",
)
GROUPED = (
    "scorer.engine=vllm",
    "scorer.device=cuda",
    "scorer.parallel.tensor=2",
    "scorer.parallel.nodes=2",
    "scorer.resources.limits.nvidia\\.com/gpu=1",
    "scorer.autoscaling.enabled=true",
    "monitoring.serviceMonitor.enabled=true",
)
CLAIM = "model.cache.storage=200Gi"


def upgrade(
    live: list[helm.Manifest], folder: Path, *sets: str
) -> subprocess.CompletedProcess[str]:
    """Render as `helm upgrade` does, beside the objects `live`."""
    flags = [flag for text in sets for flag in ("--set", text)]
    with cluster_with(live, folder) as kubeconfig:
        asking = ("--dry-run=server", "--disable-openapi-validation", "--kubeconfig", kubeconfig)
        return helm.call(
            "helm", "template", "outrider", helm.CHART, "--namespace", "llm", *asking, *flags
        )


def live(replicas: int, *sets: str) -> list[helm.Manifest]:
    """Return the workloads that a release with `sets` made, grown or shrunk to `replicas`."""
    kinds = ("Deployment", "StatefulSet", "LeaderWorkerSet")
    found = [manifest for manifest in helm.render(*sets) if manifest["kind"] in kinds]
    owner = {"meta.helm.sh/release-name": "outrider", "meta.helm.sh/release-namespace": "llm"}
    return [
        manifest
        | {
            "metadata": manifest["metadata"] | {"annotations": owner},
            "spec": manifest["spec"] | {"replicas": replicas},
        }
        for manifest in found
    ]


@pytest.mark.parametrize("replicas", [7, 0])
@pytest.mark.parametrize(("before", "after"), [((), SCALED), (SCALED, SCALED), (GROUPED, GROUPED)])
def test_upgrade_of_an_autoscaled_release_keeps_the_replicas_that_run(
    replicas: int, before: tuple[str, ...], after: tuple[str, ...], tmp_path: Path
) -> None:
    done = upgrade(live(replicas, *before), tmp_path, *after)
    assert done.returncode == 0, done.stderr
    scaled = live(replicas, *after)
    rendered = helm.parse(done.stdout)
    for workload in scaled:
        same = helm.only(rendered, workload["kind"], workload["metadata"]["name"])
        wanted = replicas if _is_scaled(workload, after) else 1
        assert same["spec"]["replicas"] == wanted


def _is_scaled(workload: helm.Manifest, sets: tuple[str, ...]) -> bool:
    component = workload["metadata"]["labels"]["app.kubernetes.io/component"]
    return any(
        setting.startswith((f"{component}.autoscaling", f"{component}s.draft.autoscaling"))
        for setting in sets
    )


def test_first_install_with_autoscaling_sets_no_replicas(tmp_path: Path) -> None:
    done = upgrade([], tmp_path, *SCALED)
    assert done.returncode == 0, done.stderr
    for workload in helm.workloads(helm.parse(done.stdout)):
        assert "replicas" not in workload["spec"]


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ((CLAIM,), ("model.cache.storage=400Gi",), "200Gi to 400Gi"),
        ((), (CLAIM,), "none to 200Gi"),
        ((CLAIM,), (), "200Gi to none"),
        ((CLAIM,), (CLAIM, "model.cache.storageClassName=fast"), "200Gi to 200Gi of class fast"),
        ((*GROUPED, CLAIM), (*GROUPED, "model.cache.storage=1Ti"), "200Gi to 1Ti"),
    ],
)
def test_upgrade_that_changes_claims_is_refused_with_the_commands(
    before: tuple[str, ...], after: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    done = upgrade(live(2, *before), tmp_path, *after)
    assert done.returncode != 0
    assert f"from {said}" in done.stderr
    if set(GROUPED) <= set(before):
        assert "kubectl -n llm delete leaderworkerset outrider-scorer-ranks`" in done.stderr
    else:
        assert "kubectl -n llm delete statefulset outrider-scorer --cascade=orphan" in done.stderr


@pytest.mark.parametrize("same", ["200Gi", "204800Mi"])
def test_upgrade_with_the_same_claims_is_rendered(same: str, tmp_path: Path) -> None:
    done = upgrade(live(2, CLAIM), tmp_path, f"model.cache.storage={same}")
    assert done.returncode == 0, done.stderr
