"""Scorers of several ranks: within a pod, and over a group of pods."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.distributed.run import get_args_parser
from transformers import AutoConfig

from outrider.engine.model.supported_models import check_shardable
from tests.support.kubernetes import helm

POD = helm.EXAMPLES / "llama-70b-tp4.yaml"
GROUP = helm.EXAMPLES / "two-nodes.yaml"
MTP = helm.EXAMPLES / "deepseek-mtp-sidecar.yaml"
WORKLOADS = {
    POD: ["outrider-scorer"],
    GROUP: ["outrider-scorer-ranks-leader", "outrider-scorer-ranks-worker"],
}


def scorer_pods(values: Path, *sets: str) -> dict[str, Any]:
    """Pod templates of scorers by workload."""
    return {
        workload["metadata"]["name"]: workload["spec"]["template"]
        for workload in helm.workloads(helm.render(*sets, values=values))
        if "scorer" in workload["metadata"]["name"]
    }


@pytest.mark.parametrize(("values", "nodes"), [(POD, 1), (GROUP, 2)])
def test_torchrun_starts_rank_per_gpu_and_lets_it_drain(values: Path, nodes: int) -> None:
    templates = scorer_pods(values)
    assert list(templates) == WORKLOADS[values]
    for template in templates.values():
        (container,) = template["spec"]["containers"]
        assert container["command"][:4] == ["python", "-P", "-m", "torch.distributed.run"]
        command = [word.replace("$(LWS_WORKER_INDEX)", "1") for word in container["command"][4:]]
        args = get_args_parser().parse_args([*command, *container["args"]])
        assert args.module
        assert args.training_script == "scorer_service"
        assert args.training_script_args == container["args"]
        assert int(args.nproc_per_node) == container["resources"]["limits"]["nvidia.com/gpu"] == 4
        assert (args.nnodes[0], args.standalone) == (str(nodes), nodes == 1)
        drain = next(a for a in container["args"] if a.startswith("--drain-grace-seconds="))
        grace = int(drain.partition("=")[2])
        assert grace < args.shutdown_timeout < template["spec"]["terminationGracePeriodSeconds"]
        assert "/dev/shm" in {mount["mountPath"] for mount in container["volumeMounts"]}


def test_ranks_of_group_find_their_leader() -> None:
    for template in scorer_pods(GROUP).values():
        command = template["spec"]["containers"][0]["command"]
        # Variables that LeaderWorkerSet gives every container.
        assert {"--node-rank=$(LWS_WORKER_INDEX)", "--master-addr=$(LWS_LEADER_ADDRESS)"} <= set(
            command
        )


def test_leader_of_group_alone_is_served_and_has_sidecars() -> None:
    manifests = helm.render("proposers.draft.placement=sidecar", values=GROUP)
    service = helm.only(manifests, "Service", "outrider-scorer")["spec"]
    leader, follower = (
        w["spec"]["template"]
        for w in helm.workloads(manifests)
        if w["kind"] in ("leader", "worker")
    )
    assert service["selector"].items() <= leader["metadata"]["labels"].items()
    assert not service["selector"].items() <= follower["metadata"]["labels"].items()
    names = [[c["name"] for c in pod["spec"]["containers"]] for pod in (leader, follower)]
    assert names == [["scorer", "proposer-draft"], ["scorer"]]
    listening = {port["name"] for port in leader["spec"]["containers"][0]["ports"]}
    assert {"grpc", "data"} <= listening
    assert "ports" not in follower["spec"]["containers"][0]
    probed = [pod["spec"]["containers"][0]["readinessProbe"] for pod in (leader, follower)]
    assert probed[0] == probed[1]
    budget = helm.only(manifests, "PodDisruptionBudget", "outrider-scorer")["spec"]["selector"]
    for pod in (leader, follower):  # losing either loses the group
        assert budget["matchLabels"].items() <= pod["metadata"]["labels"].items()


def test_target_with_module_shares_its_folder() -> None:
    leader, follower = scorer_pods(MTP).values()
    scorer, module = leader["spec"]["containers"]
    (other,) = follower["spec"]["containers"]
    for rank in (scorer, other):  # all keep the states: they run the same steps
        assert "--hidden-features=final" in rank["args"]
    folder = next(a for a in scorer["args"] if a.startswith("--model="))
    target = folder.replace("--model", "--target-model")
    assert {"--method=mtp", folder, target} <= set(module["args"])
    assert "/models" in {mount["mountPath"] for mount in module["volumeMounts"]}
    gpus = [c["resources"]["limits"]["nvidia.com/gpu"] for c in (scorer, module, other)]
    assert gpus == [4, 1, 4]
    check_shardable(AutoConfig.for_model("deepseek_v3"), 16)  # its defaults are DeepSeek-V3's


@pytest.mark.parametrize(("values", "open_to_ranks"), [(POD, False), (GROUP, True)])
def test_ranks_on_several_nodes_reach_each_other(values: Path, open_to_ranks: bool) -> None:
    policy = helm.only(helm.render(values=values), "NetworkPolicy", "outrider-scorer")["spec"]
    scorers = [{"podSelector": policy["podSelector"]}]
    for way, peers in (("ingress", "from"), ("egress", "to")):
        ranges = [
            rule["ports"]
            for rule in policy[way]
            if rule.get(peers) == scorers and {"port": 7001} not in rule["ports"]
        ]
        assert ranges == ([[{"port": 1024, "endPort": 65535}]] if open_to_ranks else [])


@pytest.mark.parametrize("engine", ["hpa", "keda"])
def test_groups_when_autoscaled_are_scaled_whole(engine: str) -> None:
    manifests = helm.render(
        "scorer.autoscaling.enabled=true", f"autoscaling.engine={engine}", values=GROUP
    )
    kind = {"hpa": "HorizontalPodAutoscaler", "keda": "ScaledObject"}[engine]
    target = helm.only(manifests, kind, "outrider-scorer")["spec"]["scaleTargetRef"]
    groups = helm.only(manifests, "LeaderWorkerSet", target["name"])
    assert (target["apiVersion"], target["kind"]) == (groups["apiVersion"], groups["kind"])
    assert "replicas" not in groups["spec"]


def test_pods_of_group_fit_their_schema(tmp_path: Path) -> None:
    # kubernetes-validate has no schema of the set itself.
    file = tmp_path / "pods.yaml"
    claims = helm.render("model.cache.storage=1Gi", values=GROUP)
    groups = helm.only(claims, "LeaderWorkerSet", "outrider-scorer-ranks")
    pods = [
        {"apiVersion": "v1", "kind": "Pod", **template, "metadata": {"name": name}}
        for name, template in scorer_pods(GROUP, "model.cache.storage=1Gi").items()
    ]
    (claim,) = groups["spec"]["leaderWorkerTemplate"]["volumeClaimTemplates"]
    claim = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", **claim}
    file.write_text(yaml.safe_dump_all([*pods, claim]))
    done = helm.call("kubernetes-validate", "-k", "1.37", "--strict", file)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (done.stdout + done.stderr).count("passed") == 3
