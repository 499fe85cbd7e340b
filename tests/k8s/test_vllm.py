"""Scorers by vLLM: over the GPUs of a pod, and over a group of pods."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.kubernetes import helm

POD = helm.EXAMPLES / "llama-70b-tp4.yaml"
GROUP = helm.EXAMPLES / "deepseek-r1-mtp.yaml"
WORKLOADS = {
    POD: ["outrider-scorer"],
    GROUP: ["outrider-scorer-ranks-leader", "outrider-scorer-ranks-worker"],
}
HEAD = "proposers.m.method=mtp,proposers.m.model=org/m"


def scorer_pods(values: Path, *sets: str) -> dict[str, Any]:
    """Pod templates of scorers by workload."""
    return {
        workload["metadata"]["name"]: workload["spec"]["template"]
        for workload in helm.workloads(helm.render(*sets, values=values))
        if "scorer" in workload["metadata"]["name"]
    }


@pytest.mark.parametrize(
    ("values", "gpus", "shared"),
    [
        (POD, 4, {"--tensor-parallel-size=4", "--pipeline-parallel-size=1"}),
        (GROUP, 8, {"--tensor-parallel-size=16", "--enable-expert-parallel", "--nnodes=2"}),
    ],
)
def test_vllm_shares_a_model_over_the_gpus_of_its_pods(
    values: Path, gpus: int, shared: set[str]
) -> None:
    templates = scorer_pods(values)
    assert list(templates) == WORKLOADS[values]
    for template in templates.values():
        (container,) = template["spec"]["containers"]
        args = container["args"]
        assert container["command"] == ["outrider", "scorer"]
        assert container["image"].endswith("-vllm")
        assert {"--engine=vllm", *shared} <= set(args)
        assert not [arg for arg in args if arg.startswith(("--threads", "--hidden-features"))]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == gpus
        assert "/dev/shm" in {mount["mountPath"] for mount in container["volumeMounts"]}


def test_vllm_drafts_with_its_own_module_by_flags_behind_dashes() -> None:
    for template in scorer_pods(GROUP).values():
        args = template["spec"]["containers"][0]["args"]
        (own,) = args[args.index("--") + 1 :]
        flag, _, value = own.partition("=")
        assert flag == "--speculative-config"
        assert json.loads(value) == {"method": "mtp", "num_speculative_tokens": 1}


@pytest.mark.parametrize("placement", ["remote", "sidecar"])
def test_vllm_keeps_the_states_that_heads_read(placement: str) -> None:
    head = ("proposers.m.method=eagle3", "proposers.m.model=org/m")
    sets = (*head, f"proposers.m.placement={placement}", "scorer.vllmFlags.seed=1")
    (template,) = scorer_pods(POD, *sets).values()
    args = template["spec"]["containers"][0]["args"]
    own = args[: args.index("--")]
    assert {"--engine=vllm", "--hidden-features=eagle3"} <= set(own)


def test_vllm_keeps_the_states_that_were_asked_for() -> None:
    shared = "scorer.vllmFlags.decode-context-parallel-size=1"  # as if it were not given
    for template in scorer_pods(POD, "scorer.hiddenFeatures=2\\,final", shared).values():
        assert "--hidden-features=2,final" in template["spec"]["containers"][0]["args"]


def test_pods_of_group_find_their_leader() -> None:
    for template in scorer_pods(GROUP).values():
        # Variables that LeaderWorkerSet gives every container.
        assert {"--node-rank=$(LWS_WORKER_INDEX)", "--master-addr=$(LWS_LEADER_ADDRESS)"} <= set(
            template["spec"]["containers"][0]["args"]
        )


def test_leader_of_group_alone_is_served() -> None:
    manifests = helm.render(values=GROUP)
    service = helm.only(manifests, "Service", "outrider-scorer")["spec"]
    leader, follower = scorer_pods(GROUP).values()
    assert service["selector"].items() <= leader["metadata"]["labels"].items()
    assert not service["selector"].items() <= follower["metadata"]["labels"].items()
    listening = {port["name"] for port in leader["spec"]["containers"][0]["ports"]}
    assert {"grpc", "data"} <= listening
    assert not {"ports", "livenessProbe", "readinessProbe", "startupProbe"} & (
        follower["spec"]["containers"][0].keys()  # vLLM's own process answers none
    )
    budget = helm.only(manifests, "PodDisruptionBudget", "outrider-scorer")["spec"]["selector"]
    for pod in (leader, follower):  # losing either loses the group
        assert budget["matchLabels"].items() <= pod["metadata"]["labels"].items()


def test_group_has_no_container_that_restarts_besides_its_scorer() -> None:
    # Its controller makes all pods of a group anew when any container of one restarts.
    for fetched in ("model.name=/models/m", "model.name=org/m"):
        for template in scorer_pods(GROUP, fetched).values():
            assert [c["name"] for c in template["spec"]["containers"]] == ["scorer"]
            for init in template["spec"].get("initContainers", ()):
                assert "--retry-seconds=3600" in init["args"]


@pytest.mark.parametrize(("values", "open_to_ranks"), [(POD, False), (GROUP, True)])
def test_pods_on_several_nodes_reach_each_other(values: Path, open_to_ranks: bool) -> None:
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
        *("scorer.autoscaling.enabled=true", "monitoring.serviceMonitor.enabled=true"),
        f"autoscaling.engine={engine}",
        values=GROUP,
    )
    kind = {"hpa": "HorizontalPodAutoscaler", "keda": "ScaledObject"}[engine]
    target = helm.only(manifests, kind, "outrider-scorer")["spec"]["scaleTargetRef"]
    groups = helm.only(manifests, "LeaderWorkerSet", target["name"])
    assert (target["apiVersion"], target["kind"]) == (groups["apiVersion"], groups["kind"])
    assert "replicas" not in groups["spec"]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            f"{HEAD},scorer.parallel.pipeline=2,scorer.parallel.tensor=2",
            "which vLLM does not give out with scorer.parallel.pipeline",
        ),
        (
            f"{HEAD},scorer.vllmFlags.prefill-context-parallel-size=2",
            "which vLLM does not give out with scorer.vllmFlags.prefill-context-parallel-size",
        ),
        (
            f"{HEAD},scorer.vllmFlags.kv-offloading-size=1",
            "which vLLM does not give out with scorer.vllmFlags.kv-offloading-size",
        ),
        (f"{HEAD},scorer.vllmFlags.speculative-config=x", "and then gives no hidden states"),
        (
            "scorer.hiddenFeatures=final,scorer.vllmFlags.kv-transfer-config=x",
            "hiddenFeatures: vLLM does not give out hidden states with scorer.vllmFlags.kv-tr",
        ),
        ("scorer.resources.limits.nvidia\\.com/gpu=2", "its limit has to be nvidia.com/gpu: 4"),
        (
            "scorer.parallel.pipeline=2,scorer.parallel.tensor=2,scorer.parallel.nodes=2,"
            "scorer.resources.requests.nvidia\\.com/gpu=2,"
            "scorer.resources.limits.nvidia\\.com/gpu=2",
            "proposers cannot reach a model whose pipeline spans nodes",
        ),
        ("scorer.flags.enable-expert-parallel=true", "say it with scorer.parallel.expert"),
    ],
)
def test_values_that_vllm_cannot_serve_are_refused(wrong: str, message: str) -> None:
    done = helm.template(wrong, values=POD)
    assert done.returncode != 0
    assert message in done.stderr
