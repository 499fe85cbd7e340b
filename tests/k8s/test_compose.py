"""compose.yaml and what it mounts: valid, accepted by the services, and of one mind."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from gateway import __main__ as gateway_main
from outrider.rpc.deployment import Deployment
from outrider.rpc.targets import parse_entries
from proposer_service import __main__ as proposer_main
from scorer_service import __main__ as scorer_main
from tests.support.kubernetes import helm

FILES = {name: helm.ROOT / name for name in ("compose.yaml", "compose.gpu.yaml")}
DASHBOARDS = helm.ROOT / "k8s/dashboards"
PARSERS = {
    "gateway": lambda argv: vars(gateway_main._parser().parse_args(argv)),
    "scorer": scorer_main.resolve,
    "proposer": proposer_main.parse,
}
SERVED = {"prometheus": 9090, "grafana": 3000, "jaeger": 16686}
"""Ports on which the images of others answer."""


def read(path: Path) -> Any:
    """A YAML file, with variables as they are by default, or "embedded"."""
    variable = r"\$\{\w+:(?:-(.*?)|\?.*?)\}"
    return yaml.safe_load(re.sub(variable, lambda found: found[1] or "embedded", path.read_text()))


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    found: dict[str, Any] = read(FILES["compose.yaml"])["services"]
    return found


def ports(service: dict[str, Any]) -> dict[str, int]:
    """Ports of one of our services by flag."""
    words = dict(word.partition("=")[::2] for word in service["command"])
    return {flag: int(value) for flag, value in words.items() if flag.endswith("port")}


def test_compose_files_fit_their_schema() -> None:
    schema = ("--builtin-schema", "vendor.compose-spec")
    done = helm.call("check-jsonschema", *schema, *FILES.values())
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", FILES)
def test_compose_commands_are_accepted_by_services(name: str) -> None:
    seen = set()
    for service, fields in read(FILES[name])["services"].items():
        if service in PARSERS:
            assert fields["command"][0] == service
            PARSERS[service](fields["command"][1:])  # exits where it does not know a flag
            seen.add(service)
    assert seen == set(PARSERS) if name == "compose.yaml" else seen == {"scorer", "proposer"}


def test_compose_override_for_gpu_keeps_all_ports(services: dict[str, Any]) -> None:
    for service, fields in read(FILES["compose.gpu.yaml"])["services"].items():
        assert ports(fields) == ports(services[service])


def test_compose_scorers_are_dialled_at_their_port(services: dict[str, Any]) -> None:
    for name in ("gateway", "proposer"):
        (flag,) = (word for word in services[name]["command"] if word.startswith("--scorer="))
        (entry,) = parse_entries(flag.partition("=")[2])
        assert entry == f"dns:scorer:{ports(services['scorer'])['--port']}"


def test_compose_publishes_open_ports_on_loopback(services: dict[str, Any]) -> None:
    for name, service in services.items():
        opened = set(ports(service).values()) if name in PARSERS else {SERVED[name]}
        for published in service.get("ports", ()):
            address, outside, inside = published.split(":")
            assert (address, outside) == ("127.0.0.1", inside)
            assert int(inside) in opened


def test_compose_mounts_exist_in_checkout(services: dict[str, Any]) -> None:
    mounts = [
        volume.split(":")[0]
        for service in services.values()
        for volume in service.get("volumes", ())
        if volume.startswith(".")
    ]
    assert mounts
    assert [mount for mount in mounts if not (helm.ROOT / mount).exists()] == []


def test_prometheus_scrapes_every_service_where_it_listens(services: dict[str, Any]) -> None:
    scraped = {}
    for job in yaml.safe_load((DASHBOARDS / "prometheus.yaml").read_text())["scrape_configs"]:
        (found,) = job["dns_sd_configs"]
        scraped[job["job_name"]] = (found["names"], found["type"], found["port"])
    assert scraped == {
        name: ([name], "A", ports(services[name])["--metrics-port"]) for name in PARSERS
    }


@pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool")
def test_prometheus_configuration_passes_promtool() -> None:
    command = ["promtool", "check", "config", DASHBOARDS / "prometheus.yaml"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stdout + done.stderr


def test_prometheus_finds_its_files_in_container(services: dict[str, Any]) -> None:
    (mount,) = services["prometheus"]["volumes"]
    inside = mount.split(":")[1]
    (flag,) = (w for w in services["prometheus"]["command"] if w.startswith("--config.file="))
    config = DASHBOARDS / "prometheus.yaml"
    assert flag.partition("=")[2] == f"{inside}/{config.relative_to(helm.ROOT / 'k8s')}"
    for rules in yaml.safe_load(config.read_text())["rule_files"]:
        path = (DASHBOARDS / rules).resolve()
        assert path.is_file()
        assert path.is_relative_to(helm.ROOT / "k8s")


def test_grafana_finds_dashboards_and_sources(services: dict[str, Any]) -> None:
    mounted = dict(volume.split(":")[1::-1] for volume in services["grafana"]["volumes"])
    (provider,) = yaml.safe_load((DASHBOARDS / "provider.yaml").read_text())["providers"]
    shown = helm.ROOT / mounted[provider["options"]["path"]]
    assert {path.stem for path in shown.glob("*.json")} == {"speculation", "latency", "capacity"}
    sources = {
        source["uid"]: source
        for source in yaml.safe_load((DASHBOARDS / "datasources.yaml").read_text())["datasources"]
    }
    for name, source in sources.items():
        url = urlsplit(source["url"])
        assert (url.hostname, url.port) == (name, SERVED[name])
    (link,) = sources["prometheus"]["jsonData"]["exemplarTraceIdDestinations"]
    assert link == {"name": "trace_id", "datasourceUid": "jaeger"}
    for kind, file in (("datasources", "datasources.yaml"), ("dashboards", "provider.yaml")):
        place = f"/etc/grafana/provisioning/{kind}/outrider.yaml"
        assert helm.ROOT / mounted[place] == DASHBOARDS / file


def test_compose_services_send_traces_to_viewer(services: dict[str, Any]) -> None:
    for name in PARSERS:
        endpoint = services[name]["environment"]["OTEL_EXPORTER_OTLP_ENDPOINT"]
        assert endpoint == "http://jaeger:4317"


def test_compose_stops_containers_after_they_drained(services: dict[str, Any]) -> None:
    for name in PARSERS:
        grace_s = int(services[name]["stop_grace_period"].removesuffix("s"))
        assert grace_s > Deployment().drain_grace_s
