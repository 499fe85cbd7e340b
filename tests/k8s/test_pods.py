"""What a component's `pod` adds, and what all pods have."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml

from tests.support.kubernetes import helm

POD: dict[str, Any] = {
    "annotations": {"mesh/inject": "false"},
    "labels": {"team": "a"},
    "volumes": [{"name": "ca", "configMap": {"name": "ca"}}],
    "volumeMounts": [{"name": "ca", "mountPath": "/etc/ca"}],
    "initContainers": [{"name": "before", "image": "busybox:1.37"}],
    "sidecars": [{"name": "beside", "image": "busybox:1.37"}],
    "envFrom": [{"secretRef": {"name": "more"}}],
    "resourceClaims": [{"name": "nic", "resourceClaimTemplateName": "nic"}],
    "securityContext": {"supplementalGroups": [7]},
    "containerSecurityContext": {"capabilities": {"add": ["IPC_LOCK"]}},
}
COMPONENTS = {
    "gateway": ("gateway", "outrider-gateway"),
    "scorer": ("scorer", "outrider-scorer"),
    "pool": ("proposers", "outrider-proposer-draft"),
}


def specs(values: dict[str, Any], tmp_path: Path) -> dict[str, dict[str, Any]]:
    """Pod templates by workload, of a model that is fetched."""
    model = {"model": {"name": "org/m"}, "proposers": {"draft": {"model": "org/d"}}}
    file = tmp_path / "values.yaml"
    file.write_text(yaml.safe_dump(model | values))
    rendered = helm.render(values=file)
    return {w["metadata"]["name"]: w["spec"]["template"] for w in helm.workloads(rendered)}


@pytest.mark.parametrize("component", COMPONENTS)
def test_pod_values_reach_their_component_alone(component: str, tmp_path: Path) -> None:
    key, name = COMPONENTS[component]
    own: dict[str, Any] = {"pod": POD}
    given = {key: {"draft": {"model": "org/d", **own}} if key == "proposers" else own}
    found = specs(given, tmp_path)
    for workload, template in found.items():
        assert ("beside" in str(template)) == (workload == name)
    template = found[name]
    spec = template["spec"]
    assert POD["annotations"].items() <= template["metadata"]["annotations"].items()
    assert POD["labels"].items() <= template["metadata"]["labels"].items()
    assert POD["volumes"][0] in spec["volumes"]
    assert spec["resourceClaims"] == POD["resourceClaims"]
    assert spec["securityContext"]["supplementalGroups"] == [7]
    assert spec["securityContext"]["runAsNonRoot"] is True
    before, fetch = spec["initContainers"]
    main, beside = spec["containers"]
    assert (before, beside) == (POD["initContainers"][0], POD["sidecars"][0])
    for container in (fetch, main):  # what downloads needs the proxy's certificates, too
        assert POD["volumeMounts"][0] in container["volumeMounts"]
        assert container["envFrom"] == POD["envFrom"]
        assert container["securityContext"]["capabilities"] == {
            "add": ["IPC_LOCK"],
            "drop": ["ALL"],
        }
        assert container["terminationMessagePolicy"] == "FallbackToLogsOnError"


def test_downloads_have_the_environment_of_their_component(tmp_path: Path) -> None:
    proxy = {"name": "HTTPS_PROXY", "value": "http://proxy:3128"}
    found = specs({"scorer": {"env": [proxy]}}, tmp_path)
    (fetch,) = found["outrider-scorer"]["spec"]["initContainers"]
    assert proxy in fetch["env"]
    assert not [e for e in fetch["env"] if e["name"] == "HF_HUB_OFFLINE"]
    assert "env" not in found["outrider-gateway"]["spec"]["initContainers"][0]


def test_downloads_to_a_node_claim_its_disk(tmp_path: Path) -> None:
    def asked(template: dict[str, Any]) -> str | None:
        (fetch,) = template["spec"]["initContainers"]
        found: str | None = fetch["resources"]["requests"].get("ephemeral-storage")
        return found

    on_node = specs({}, tmp_path)
    assert {name: asked(template) for name, template in on_node.items()} == {
        "outrider-gateway": None,  # the tokenizer alone
        "outrider-scorer": "64Gi",
        "outrider-proposer-draft": "64Gi",
    }
    claimed = specs({"model": {"name": "org/m", "cache": {"storage": "9Gi"}}}, tmp_path)
    assert asked(claimed["outrider-scorer"]) is None


def test_long_names_of_releases_stay_apart() -> None:
    begin = "one-and-the-same-beginning-of-a-name"
    names = [
        {m["metadata"]["name"] for m in helm.render(f"fullnameOverride={begin}-{end}")}
        for end in ("llama", "qwen")
    ]
    assert not names[0] & names[1]


class _Gateway(BaseHTTPRequestHandler):
    """Is not there yet, and then answers."""

    calls: ClassVar[list[tuple[str, str | None]]] = []

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.calls.append((body["model"], self.headers["authorization"]))
        if len(self.calls) == 1:
            self.send_error(503)
            return
        answer = {
            "choices": [{"text": "return 1"}],
            "usage": {"completion_tokens": 3 if body["model"] == "good" else 0},
            "aux_info": {"avg_tokens_per_iter": 2.5},
        }
        text = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize(("model", "code"), [("good", 0), ("empty", 1)])
def test_helm_test_asks_until_a_token_comes(model: str, code: int, tmp_path: Path) -> None:
    pod = helm.only(
        helm.render(f"model.servedName={model}", "gateway.apiKeySecret=keys"),
        *("Pod", "outrider-gateway-test"),
    )
    (container,) = pod["spec"]["containers"]
    assert container["args"] == ["http://outrider-gateway.llm.svc/v1/completions", model]
    (tmp_path / "keys").write_text("first\nsecond\n")
    script = container["command"][-1].replace("/etc/outrider/api-keys", str(tmp_path))
    _Gateway.calls.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), _Gateway) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/v1/completions"
        done = subprocess.run(
            [sys.executable, "-c", script.replace("time.sleep(5)", "time.sleep(0)"), url, model],
            capture_output=True,
            text=True,
            timeout=30,
        )
        server.shutdown()
    assert done.returncode == code, done.stderr
    assert _Gateway.calls == [(model, "Bearer first")] * 2
    assert "avg_tokens_per_iter" in done.stdout
