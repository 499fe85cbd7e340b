"""The chart, rendered by the real helm that `make k8s` installs."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[3]
CHART = ROOT / "k8s" / "chart" / "outrider"
EXAMPLES = ROOT / "k8s" / "examples"
TOOLS = ROOT / ".venv" / "k8s" / "bin"

Manifest = dict[str, Any]


def tool(name: str) -> Path:
    """A tool of k8s/tools.sh; the test fails without it."""
    path = TOOLS / name
    if not path.exists():
        pytest.fail(f"{path} is missing: `make k8s` installs it.")
    return path


def call(program: str, *args: str | Path) -> subprocess.CompletedProcess[str]:
    """Runs a tool; stdout and stderr as text."""
    command = [tool(program), *args]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=280)


def python(program: str, given: object) -> list[Any]:
    """Run a program of the tools' Python on JSON; returns the JSON of its lines."""
    done = subprocess.run(
        [tool("python"), "-c", program],
        input=json.dumps(given),
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def validate(versions: list[str], *files: Path) -> subprocess.CompletedProcess[str]:
    """Validate manifests against the schemas of some versions of Kubernetes."""
    return call("python", Path(__file__).with_name("schemas.py"), ",".join(versions), *files)


def template(*sets: str, values: Path | None = None) -> subprocess.CompletedProcess[str]:
    """`helm template` with `--set` for each of `sets`; what was rendered once is kept."""
    return _template(sets, values, "" if values is None else values.read_text())


@cache
def _template(
    sets: tuple[str, ...], values: Path | None, _text: str
) -> subprocess.CompletedProcess[str]:
    files = () if values is None else ("--values", values)
    flags = [flag for text in sets for flag in ("--set", text)]
    return call("helm", "template", "outrider", CHART, "--namespace", "llm", *files, *flags)


def render(*sets: str, values: Path | None = None) -> list[Manifest]:
    """What `template` says, parsed."""
    done = template(*sets, values=values)
    assert done.returncode == 0, done.stderr
    return parse(done.stdout)


def parse(text: str) -> list[Manifest]:
    return [manifest for manifest in yaml.load_all(text, yaml.CSafeLoader) if manifest]


def only(manifests: list[Manifest], kind: str, name: str) -> Manifest:
    """The one manifest of that kind and name."""
    found = [m for m in manifests if (m["kind"], m["metadata"]["name"]) == (kind, name)]
    assert len(found) == 1, [(m["kind"], m["metadata"]["name"]) for m in manifests]
    return found[0]


def workloads(manifests: list[Manifest]) -> Iterator[Manifest]:
    """Deployments and stateful sets, and as if they were: the two kinds of pods of groups."""
    for manifest in manifests:
        if manifest["kind"] in ("Deployment", "StatefulSet"):
            yield manifest
        elif manifest["kind"] == "LeaderWorkerSet":
            for kind in ("leader", "worker"):
                name = f"{manifest['metadata']['name']}-{kind}"
                template = manifest["spec"]["leaderWorkerTemplate"][f"{kind}Template"]
                yield {"kind": kind, "metadata": {"name": name}, "spec": {"template": template}}


def containers(manifest: Manifest) -> list[Manifest]:
    """A workload's containers, without those that only prepare."""
    found: list[Manifest] = manifest["spec"]["template"]["spec"]["containers"]
    return found
