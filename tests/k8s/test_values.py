"""What the values do, and what is said about wrong ones."""

from __future__ import annotations

import math
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gateway import __main__ as gateway_main
from outrider import engines
from outrider.drafting.building.config import HeadConfig, SuffixConfig
from outrider.rpc.codec import METHODS
from proposer_service import __main__ as proposer_main
from scorer_service import __main__ as scorer_main
from tests.support.kubernetes import helm


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("scorer.replica=2", "at '/scorer': additional properties 'replica' not allowed"),
        ("model.name=llama", "at '/model/name': 'llama' does not match pattern"),
        ("scorer.device=tpu", "at '/scorer/device': value must be one of 'cpu', 'cuda'"),
        ("proposers.Draft.replicas=1", "at '/proposers': additional properties 'Draft' not"),
        ("proposers.draft.replicas=-1", "at '/proposers/draft/replicas': minimum: got -1"),
        (
            "scorer.env[0].name=A,scorer.env[0].value=1",
            "at '/scorer/env/0/value': got number, want",
        ),
        ("scorer.flags.port=1", "scorer.flags.port: the chart sets --port itself"),
        ("scorer.flags.data-port=1", "scorer.flags.data-port: the chart sets --data-port itself"),
        ("proposers.draft.flags.method=x", "proposers.draft.flags.method: the chart sets"),
        ("proposers.draft.method=suffix\\,suffix", "name each method once"),
        ("proposers.draft.method=suffix\\,hydra", 'is "suffix,hydra": known are deterministic,'),
        ("proposers.draft.method=eagle3\\,draft_model", "one of draft_model,eagle3 drafts with"),
        ("proposers.draft.method=mtp\\,eagle", "one of mtp,eagle drafts with"),
        ("proposers.draft.method=eagle", "method eagle needs the folder or the Hugging Face id"),
        ("model.name=org/model", "proposers.draft drafts with the embedded model"),
        ("proposers.draft.method=mtp,model.name=org/model", "that was trained for org/model"),
        ("proposers.draft.flags.target-model=x", "target-model: the chart sets"),
        ("scorer.flags.hidden-features=final", "hidden-features: the chart sets"),
        ("scorer.hiddenFeatures=first", "at '/scorer/hiddenFeatures': 'first' does not match"),
        (
            "scorer.hiddenFeatures=eagle3,proposers.draft.method=medusa",
            "method medusa of proposers.draft reads final",
        ),
        ("scorer.device=cuda", "name scorer.resources, as in limits: {cpu"),
        ("scorer.device=cuda,scorer.resources.limits.cpu=2", "scorer.resources need a GPU"),
        ("proposers.draft.device=cuda", "proposers.draft.device is cuda: its resources need a GPU"),
        ("tls.enabled=true", "tls.enabled needs tls.secretName or tls.certManager.enabled"),
        ("tls.certManager.enabled=true", "needs tls.certManager.issuerRef.name"),
        (
            "tls.enabled=true,tls.secretName=tls,tls.certManager.enabled=true",
            "tls.secretName and tls.certManager.enabled exclude each other",
        ),
        ("scorer.tensorParallelSize=4", "additional properties 'tensorParallelSize' not allowed"),
    ],
)
def test_values_that_are_wrong_are_refused(wrong: str, message: str) -> None:
    done = helm.template(wrong)
    assert done.returncode != 0
    assert message in done.stderr


def test_autoscaling_that_cannot_work_is_refused() -> None:
    on = "proposers.draft.autoscaling.enabled=true"
    sidecar = helm.template(on, "proposers.draft.placement=sidecar")
    assert "a sidecar is scaled with its scorer" in sidecar.stderr
    for owner in ("scorer", "proposers.draft"):
        here = f"{owner}.autoscaling.enabled=true"
        zero = helm.template(here, f"{owner}.autoscaling.minReplicas=0")
        assert (
            f"{owner}.autoscaling.minReplicas is 0: that needs autoscaling.engine keda"
            in zero.stderr
        )
        blind = helm.template(here)
        assert f"{owner}.autoscaling.enabled needs monitoring.serviceMonitor" in blind.stderr
    for owner in ("gateway", "scorer", "proposers.draft"):
        sets = [f"{owner}.autoscaling.{value}" for value in ("minReplicas=3", "maxReplicas=2")]
        helm.render(*sets)  # which nobody reads
        most = helm.template(*sets, f"{owner}.autoscaling.enabled=true")
        assert f"{owner}.autoscaling: minReplicas 3 is more than maxReplicas 2" in most.stderr


@pytest.mark.parametrize("values", sorted(helm.EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_flags_of_every_example_are_accepted_by_services(
    values: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "find_spec", lambda _: True)  # as in the image with vLLM
    for name in ("tls.crt", "tls.key", "ca.crt"):
        (tmp_path / name).touch()
    parsers = {
        "gateway": gateway_main._parser().parse_args,
        "scorer": scorer_main.resolve,
        "proposer": proposer_main.parse,
    }
    seen = set()
    for workload in helm.workloads(helm.render(values=values)):
        for container in helm.containers(workload):
            service = container["name"].partition("-")[0]
            args = [arg.replace("/etc/outrider/tls", str(tmp_path)) for arg in container["args"]]
            assert container["command"][-2:] == ["outrider", service]
            seen.add(service)
            args = [arg.replace("$(LWS_WORKER_INDEX)", "1") for arg in args]
            parsers[service](args)  # exits where it does not know one
            if any(arg.startswith("--in-process-proposer=") for arg in args):
                seen.add("proposer")
    assert seen >= {"gateway", "scorer"}


def test_flags_from_values_have_command_line_form() -> None:
    flags = "max-num-seqs=64,gpu-memory-utilization=0.85,enable-prefix-caching=false"
    sets = ",".join(f"scorer.flags.{flag}" for flag in flags.split(","))
    scorer = helm.only(helm.render(sets), "StatefulSet", "outrider-scorer")
    args = helm.containers(scorer)[0]["args"]
    assert {"--max-num-seqs=64", "--gpu-memory-utilization=0.85"} <= set(args)
    parsed = scorer_main.parser().parse_args(args)
    assert (parsed.max_num_seqs, parsed.enable_prefix_caching) == (64, False)


@pytest.mark.parametrize("name", ["Llama 3: 8B", "coder #2", 'the "fast" one'])
def test_served_name_with_yaml_syntax_is_kept(name: str) -> None:
    for workload in helm.workloads(helm.render(f"model.servedName={name}")):
        (container,) = helm.containers(workload)
        if container["name"] != "proposer":
            assert f"--served-model-name={name}" in container["args"]


def test_pool_switch_when_false_is_off_by_name() -> None:
    values = ("proposers.draft.method=suffix", "proposers.draft.flags.shared-memory-across-tenants")
    pool = helm.only(
        helm.render(values[0], f"{values[1]}=false"), "Deployment", "outrider-proposer-draft"
    )
    config, _ = proposer_main.parse(helm.containers(pool)[0]["args"])
    assert isinstance(config.methods[0], SuffixConfig)
    assert not config.methods[0].settings.shared_across_tenants


def test_pool_when_null_is_removed_and_others_inherit_defaults() -> None:
    none = helm.render("proposers.draft=null")
    assert not [
        m for m in none if "proposer" in m["metadata"]["name"] and m["kind"] == "Deployment"
    ]
    pools = helm.render("proposerDefaults.replicas=3", "proposers.lookup.method=ngram")
    for name in ("draft", "lookup"):
        pool = helm.only(pools, "Deployment", f"outrider-proposer-{name}")
        assert pool["spec"]["replicas"] == 3


def test_drain_of_every_pod_fits_its_grace_period() -> None:
    manifests = helm.render("gateway.preStopSeconds=7", "gateway.drainGraceSeconds=300")
    for workload in helm.workloads(manifests):
        spec = workload["spec"]["template"]["spec"]
        (container,) = spec["containers"]
        (grace,) = (
            int(arg.partition("=")[2])
            for arg in container["args"]
            if arg.startswith("--drain-grace-seconds=")
        )
        sleep = container.get("lifecycle", {}).get("preStop", {}).get("sleep", {"seconds": 0})
        assert spec["terminationGracePeriodSeconds"] > grace + sleep["seconds"]


def test_start_that_takes_too_long_ends_and_says_why() -> None:
    for workload in helm.workloads(helm.render("startSeconds=95")):
        (container,) = helm.containers(workload)
        assert "--start-timeout=95" in container["args"]
        probe = container["startupProbe"]
        # The first probe comes with the container, before Python has read a flag.
        killed_after_s = probe["periodSeconds"] * (probe["failureThreshold"] - 1)
        assert killed_after_s >= 95 + 30
        deadline_s = workload["spec"].get("progressDeadlineSeconds", math.inf)
        assert deadline_s > killed_after_s + probe["periodSeconds"]


def test_rollout_of_gpu_pods_needs_no_further_gpu() -> None:
    seen = set()
    for manifest in helm.render(values=helm.EXAMPLES / "gpu-node.yaml"):
        if manifest["kind"] == "Deployment":
            limits = helm.containers(manifest)[0]["resources"]["limits"]
            update = manifest["spec"].get("strategy", {}).get("rollingUpdate", {})
            seen.add(("nvidia.com/gpu" in limits, update.get("maxSurge")))
    assert seen == {(True, 0), (False, 1)}
    on_cpus = helm.only(helm.render(), "Deployment", "outrider-proposer-draft")
    assert "strategy" not in on_cpus["spec"]


def test_sidecar_of_scorer_has_no_readiness_of_its_own() -> None:
    manifests = helm.render("proposers.draft.placement=sidecar", "proposers.draft.model=org/draft")
    scorer = helm.only(manifests, "StatefulSet", "outrider-scorer")
    main, sidecar = helm.containers(scorer)
    probes = {"startupProbe", "readinessProbe", "livenessProbe"}
    for workload in helm.workloads(manifests):
        assert probes <= helm.containers(workload)[0].keys()
    assert probes <= main.keys()
    assert not probes & sidecar.keys()  # one that fails would take its scorer out of service
    assert "initContainers" not in scorer["spec"]["template"]["spec"]
    service = helm.only(manifests, "Service", "outrider-scorer")
    assert service["spec"]["publishNotReadyAddresses"] is True
    budgets = {
        name: helm.only(manifests, "PodDisruptionBudget", f"outrider-{name}")["spec"]
        for name in ("gateway", "scorer")
    }
    policies = {name: budget["unhealthyPodEvictionPolicy"] for name, budget in budgets.items()}
    # A serving scorer in a pod that its sidecar makes unhealthy is not to be evicted freely.
    assert policies == {"gateway": "AlwaysAllow", "scorer": "IfHealthyBudget"}


def test_sidecar_that_crashes_is_started_again_without_its_container(tmp_path: Path) -> None:
    scorer = helm.only(
        helm.render("proposers.draft.placement=sidecar"), "StatefulSet", "outrider-scorer"
    )
    _, sidecar = helm.containers(scorer)
    *shell, script, program, service = sidecar["command"]
    assert (shell, program, service) == (["sh", "-c"], "outrider", "proposer")
    # Crashes twice, then serves until it is told to end.
    log, fake = tmp_path / "log", tmp_path / "outrider"
    fake.write_text(
        f"#!/bin/sh\ntrap 'echo ended >>{log}; exit 0' TERM\n"
        f'echo begun "$@" >>{log}\n'
        f"[ $(wc -l <{log}) -lt 3 ] && exit 1\n"
        "while :; do sleep 0.05; done\n"
    )
    fake.chmod(0o755)
    command = [*shell, script.replace("sleep 10", "sleep 0.05"), str(fake), service, "--pool=draft"]
    with subprocess.Popen(command) as process:
        deadline = time.monotonic() + 30
        while not (log.exists() and len(log.read_text().splitlines()) == 3):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert process.poll() is None
        process.terminate()
        assert process.wait(30) == 0
    assert log.read_text().splitlines() == [*["begun proposer --pool=draft"] * 3, "ended"]


def test_sidecar_drafts_until_its_scorer_ends(socket_folder: Path) -> None:
    scorer = helm.only(
        helm.render("proposers.draft.placement=sidecar"), "StatefulSet", "outrider-scorer"
    )
    main, sidecar = helm.containers(scorer)
    (path,) = (a.partition("=")[2] for a in main["args"] if a.startswith("--listen-unix="))
    program, *args = sidecar["lifecycle"]["preStop"]["exec"]["command"]
    assert program == "python"
    here = socket_folder / "scorer.sock"
    command = [sys.executable, *(arg.replace(path, str(here)) for arg in args)]
    assert str(here) in command[-1]
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(here))
        listening.listen()
        listening.settimeout(30)
        hook = subprocess.Popen(command)
        for _ in range(2):  # it waits as long as somebody listens
            listening.accept()[0].close()
            assert hook.poll() is None
    assert hook.wait(30) == 0


def test_certificates_when_rendered_name_what_is_dialled() -> None:
    manifests = helm.render(
        "tls.enabled=true", "tls.certManager.enabled=true", "tls.certManager.issuerRef.name=ca"
    )
    gateway = helm.containers(helm.only(manifests, "Deployment", "outrider-gateway"))[0]
    (dialled,) = (arg for arg in gateway["args"] if arg.startswith("--scorer="))
    host = dialled.removeprefix("--scorer=dns:").partition(":")[0]
    certificate = helm.only(manifests, "Certificate", "outrider-scorer")
    assert host in certificate["spec"]["dnsNames"]
    for workload in helm.workloads(manifests):
        (tls,) = (
            volume["secret"]["secretName"]
            for volume in workload["spec"]["template"]["spec"]["volumes"]
            if volume["name"] == "tls"
        )
        assert tls in {m["spec"]["secretName"] for m in manifests if m["kind"] == "Certificate"}


def test_hub_token_is_seen_only_by_what_downloads() -> None:
    manifests = helm.render(
        "model.name=org/model", "model.cache.tokenSecret=hub", "proposers.draft.method=ngram"
    )
    scorer = helm.only(manifests, "StatefulSet", "outrider-scorer")["spec"]["template"]["spec"]
    (fetch,), (serve,) = scorer["initContainers"], scorer["containers"]
    assert "/etc/outrider/hub" in {mount["mountPath"] for mount in fetch["volumeMounts"]}
    assert "/etc/outrider/hub" not in {mount["mountPath"] for mount in serve["volumeMounts"]}
    assert {"name": "HF_HUB_OFFLINE", "value": "1"} in serve["env"]
    draft = helm.only(manifests, "Deployment", "outrider-proposer-draft")
    assert "hub" not in str(draft)


def test_pool_methods_of_chart_equal_the_proposers() -> None:
    for method in METHODS:
        helm.render(f"proposers.draft.method={method}", "proposers.draft.model=org/draft")
    several = helm.render("proposers.draft.method=suffix\\,draft_model")
    args = helm.containers(helm.only(several, "Deployment", "outrider-proposer-draft"))[0]["args"]
    assert {"--method=suffix,draft_model", "--model=embedded"} <= set(args)


def test_scorer_with_pools_keeps_the_states_they_read() -> None:
    def kept(*sets: str) -> list[str]:
        scorer = helm.only(helm.render(*sets), "StatefulSet", "outrider-scorer")
        args = helm.containers(scorer)[0]["args"]
        return [a for a in args if a.startswith("--hidden-features")]

    assert kept() == []
    module = ("proposers.draft.method=eagle3\\,ngram", "proposers.draft.model=org/module")
    assert kept(*module) == ["--hidden-features=eagle3"]
    second = "proposers.second.method=mtp"
    assert kept(*module, second) == ["--hidden-features=eagle3,final"]
    assert kept(*module, "scorer.hiddenFeatures=1\\,14") == ["--hidden-features=1,14"]


def test_module_pool_has_target_and_what_it_shares() -> None:
    sets = ("model.name=org/target", "proposers.draft.method=mtp")
    ours = "proposers.draft.model=/models/module"
    rendered = helm.render(*sets, ours, "model.volume.emptyDir.medium=Memory")
    pool = helm.only(rendered, "Deployment", "outrider-proposer-draft")
    (fetch,) = pool["spec"]["template"]["spec"]["initContainers"]
    assert fetch["args"][:-1] == ["/models/module", "--module-of=org/target"]
    assert "/models" in {mount["mountPath"] for mount in fetch["volumeMounts"]}
    config, _ = proposer_main.parse(helm.containers(pool)[0]["args"])
    (method,) = config.methods
    assert isinstance(method, HeadConfig)
    assert (method.model, method.target_model, method.dtype) == (
        *("/models/module", "org/target"),
        None,
    )
    policy = helm.only(rendered, "NetworkPolicy", "outrider-proposer")
    assert {"ports": [{"port": 443}]} in policy["spec"]["egress"]


@pytest.mark.parametrize(
    "gpu",
    [
        ("resources.limits.nvidia\\.com/gpu=1",),
        ("resources.limits.nvidia\\.com/mig-1g\\.18gb=1",),
        ("resources.claims[0].name=gpu", "pod.resourceClaims[0].name=gpu"),
    ],
)
def test_gpu_as_partition_or_claim_is_rendered(gpu: tuple[str, ...]) -> None:
    for owner in ("scorer", "proposers.draft"):
        rendered = helm.render(f"{owner}.device=cuda", *(f"{owner}.{value}" for value in gpu))
        (found,) = (
            workload["spec"]["template"]["spec"]
            for workload in helm.workloads(rendered)
            if "--device=cuda" in helm.containers(workload)[0]["args"]
        )
        claims = [claim["name"] for claim in found.get("resourceClaims", ())]
        asked = found["containers"][0]["resources"].get("claims", [])
        assert [claim["name"] for claim in asked] == claims == ["gpu"] * (len(gpu) - 1)
