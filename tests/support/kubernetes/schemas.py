"""Validates manifests against the schemas that kubernetes-validate brings, each read once.

    .venv/k8s/bin/python tests/support/kubernetes/schemas.py VERSION[,...] FILE...

Prints what strict validation says against them, and `KIND: NUMBER` of validated manifests. Runs in
the tools' environment; kubernetes-validate itself reads its schemas anew for each manifest.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml
from jsonschema import Draft202012Validator
from referencing import Registry, Resource

_ROOT = Path(kubernetes_validate.__file__).parent / "kubernetes-json-schema"


@cache
def _definitions(version: str) -> tuple[Path, Any]:
    folder = sorted(_ROOT.glob(f"v{version}.*-local-strict"))[-1]
    contents = json.loads((folder / "_definitions.json").read_text())
    return folder, Resource.from_contents(contents) @ Registry()


@cache
def _validator(api_version: str, kind: str, version: str) -> Draft202012Validator | None:
    folder, definitions = _definitions(version)
    group, _, number = api_version.rpartition("/")
    prefix = f"{group.partition('.')[0]}-" if group else ""
    path = folder / f"{kind.lower()}-{prefix}{number}.json"
    if not path.is_file():
        return None
    schema = json.loads(path.read_text())
    return Draft202012Validator(schema, registry=Resource.from_contents(schema) @ definitions)


def _parts(manifest: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """Yield a manifest, and what there are schemas for in one that has none."""
    if not manifest:
        return
    yield manifest
    spec = manifest.get("spec", {})
    if manifest["kind"] == "LeaderWorkerSet":
        group = spec["leaderWorkerTemplate"]
        for rank in ("leader", "worker"):
            name = {"name": f"{manifest['metadata']['name']}-{rank}"}
            template = group[f"{rank}Template"]
            metadata = template["metadata"] | name
            yield {"apiVersion": "v1", "kind": "Pod"} | template | {"metadata": metadata}
        for claim in group.get("volumeClaimTemplates", ()):
            yield {"apiVersion": "v1", "kind": "PersistentVolumeClaim"} | claim
    elif manifest["kind"] == "ClusterServingRuntime":
        pod = {"containers": spec["containers"]}
        yield {"apiVersion": "v1", "kind": "Pod", "metadata": manifest["metadata"], "spec": pod}


def main(versions: str, *files: str) -> int:
    """Return the number of problems, 100 at most."""
    found = 0
    seen: Counter[str] = Counter()
    texts: dict[str, str] = {}  # each once, with a file that has it
    for file in files:
        texts = dict.fromkeys(Path(file).read_text().split("\n---"), file) | texts
    for text, file in texts.items():
        for manifest in _parts(yaml.load(text, yaml.CSafeLoader)):
            kind = manifest["kind"]
            for version in versions.split(","):
                validator = _validator(manifest["apiVersion"], kind, version)
                if validator is None:
                    continue
                seen[kind] += 1
                for error in validator.iter_errors(manifest):
                    found += 1
                    where = f"{Path(file).name}: {kind} {manifest['metadata']['name']}, {version}"
                    print(f"{where}: {'.'.join(map(str, error.path))}: {error.message}")
    print(*(f"{kind}: {number}" for kind, number in sorted(seen.items())), sep="\n")
    return min(found, 100)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
