"""Who finds whom, and who may reach whom."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.kubernetes import helm

EVERYTHING = (
    "model.name=org/target",
    "model.cache.tokenSecret=hub",
    "proposers.draft.model=org/draft",
    "proposers.lookup.method=ngram",
    "proposers.beside.placement=sidecar",
    "proposers.beside.model=org/beside",
    "proposers.within.placement=sidecar",
    "proposers.within.method=ngram",
    "otel.endpoint=http://collector.monitoring:4319",
    "tls.enabled=true",
    "tls.secretName=tls",
)


@pytest.fixture(scope="module")
def manifests() -> list[helm.Manifest]:
    return helm.render(*EVERYTHING)


def pods(manifests: list[helm.Manifest]) -> dict[str, helm.Manifest]:
    """Pod templates by the name of their workload."""
    return {m["metadata"]["name"]: m["spec"]["template"] for m in helm.workloads(manifests)}


def chosen(manifests: list[helm.Manifest], labels: dict[str, str]) -> set[str]:
    """Workloads whose pods have all the labels."""
    return {
        name
        for name, pod in pods(manifests).items()
        if labels.items() <= pod["metadata"]["labels"].items()
    }


def allows(manifests: list[helm.Manifest], source: str, target: str, port: int) -> bool:
    """Whether the policies of both pods let `source` call `target`."""
    return _rule(manifests, source, target, port, "egress", "to") and _rule(
        manifests, target, source, port, "ingress", "from"
    )


def _rule(
    manifests: list[helm.Manifest], mine: str, other: str, port: int, way: str, peers: str
) -> bool:
    (policy,) = (
        m["spec"]
        for m in manifests
        if m["kind"] == "NetworkPolicy"
        and mine in chosen(manifests, m["spec"]["podSelector"]["matchLabels"])
    )
    return any(
        port in {item["port"] for item in rule["ports"]}
        and any(_is(manifests, peer, other) for peer in rule.get(peers, [{}]))
        for rule in policy[way]
    )


def _is(manifests: list[helm.Manifest], peer: dict[str, Any], name: str) -> bool:
    if "podSelector" in peer:
        return name in chosen(manifests, peer["podSelector"]["matchLabels"])
    return True  # every namespace, or no restriction


def test_selectors_of_services_and_budgets_match_their_pods(manifests: list[helm.Manifest]) -> None:
    found = 0
    for manifest in manifests:
        name, spec = manifest["metadata"]["name"], manifest["spec"]
        if manifest["kind"] == "Service":
            assert chosen(manifests, spec["selector"]) == {name.removesuffix("-metrics")}
        elif manifest["kind"] == "PodDisruptionBudget":
            assert chosen(manifests, spec["selector"]["matchLabels"]) == {name}
        else:
            continue
        found += 1
    assert found == 2 * len(pods(manifests)) + 1 == 9  # the gateways' metrics have their own


def test_service_ports_lead_to_container_ports(manifests: list[helm.Manifest]) -> None:
    for service in (m for m in manifests if m["kind"] == "Service"):
        workload = service["metadata"]["name"].removesuffix("-metrics")
        containers = pods(manifests)[workload]["spec"]["containers"]
        listening = {port["name"]: port for c in containers for port in c["ports"]}
        for port in service["spec"]["ports"]:
            assert port["targetPort"] in listening
            if service["spec"].get("clusterIP") == "None":  # dialled directly
                assert port["port"] == listening[port["targetPort"]]["containerPort"]


def test_containers_of_one_pod_share_no_port(manifests: list[helm.Manifest]) -> None:
    for pod in pods(manifests).values():
        ports = [
            int(arg.rpartition("=")[2])
            for container in pod["spec"]["containers"]
            for arg in container["args"]
            if arg.partition("=")[0].endswith("port")
        ]
        assert len(ports) == len(set(ports)) >= 3


def test_container_ports_equal_those_that_flags_open(manifests: list[helm.Manifest]) -> None:
    for pod in pods(manifests).values():
        for container in pod["spec"]["containers"]:
            flags = dict(arg.removeprefix("--").split("=", 1) for arg in container["args"])
            opened = {int(value) for flag, value in flags.items() if flag.endswith("port")}
            named = {port["containerPort"] for port in container["ports"]}
            assert named == opened - {int(flags["health-port"])}  # the kubelet's alone


def test_network_policies_allow_only_what_is_needed(manifests: list[helm.Manifest]) -> None:
    gateway, scorer = "outrider-gateway", "outrider-scorer"
    draft, lookup = "outrider-proposer-draft", "outrider-proposer-lookup"
    for caller in (gateway, draft, lookup):
        assert allows(manifests, caller, scorer, 7001)
        assert not allows(manifests, scorer, caller, 7001)
    for proposer in (draft, lookup):
        assert allows(manifests, proposer, scorer, 7002)
        assert not allows(manifests, scorer, proposer, 7002)
    assert not _rule(manifests, gateway, scorer, 7002, "egress", "to")
    assert not _rule(manifests, scorer, gateway, 7002, "ingress", "from")
    assert not allows(manifests, draft, gateway, 50051)
    assert not allows(manifests, gateway, draft, 7003)
    for target, ports in {gateway: [8000, 9100], scorer: [9101, 9102, 9103], draft: [9102]}.items():
        for port in ports:  # Prometheus', which has no policy of ours
            assert _rule(manifests, target, "prometheus", port, "ingress", "from")


def test_network_policies_with_values_open_what_they_ask_for(
    manifests: list[helm.Manifest],
) -> None:
    def goes_out(rendered: list[helm.Manifest], name: str, port: int) -> bool:
        return _rule(rendered, name, "elsewhere", port, "egress", "to")

    plain = helm.render()
    for name in ("outrider-gateway", "outrider-scorer", "outrider-proposer-draft"):
        assert goes_out(manifests, name, 53)
        assert goes_out(plain, name, 53)
        assert goes_out(manifests, name, 4319)
        assert goes_out(manifests, name, 443)
        assert not goes_out(plain, name, 443)
        assert not goes_out(plain, name, 4317)


@pytest.mark.parametrize(
    ("endpoint", "port"),
    [
        ("https://collector", 443),  # what gRPC dials then
        ("http://[2001:db8::1]:4319", 4319),
    ],
)
def test_network_policies_with_traces_open_their_port(endpoint: str, port: int) -> None:
    rendered = helm.render(f"otel.endpoint={endpoint}")
    assert _rule(rendered, "outrider-gateway", "elsewhere", port, "egress", "to")


def test_volume_mounts_have_their_volumes(manifests: list[helm.Manifest]) -> None:
    for pod in pods(manifests).values():
        spec = pod["spec"]
        volumes = {volume["name"] for volume in spec["volumes"]}
        used = {
            mount["name"]
            for container in [*spec.get("initContainers", ()), *spec["containers"]]
            for mount in container["volumeMounts"]
        }
        assert used == volumes


def test_names_of_long_releases_stay_within_dns_labels() -> None:
    long = helm.render(
        f"fullnameOverride={'x' * 60}", f"proposers.{'p' * 20}.method=ngram", "tls.enabled=true",
        "tls.certManager.enabled=true", "tls.certManager.issuerRef.name=ca",
    )  # fmt: skip
    names = [m["metadata"]["name"] for m in long]
    assert max(map(len, names)) <= 63
    assert len({(m["kind"], m["metadata"]["name"]) for m in long}) == len(long)
