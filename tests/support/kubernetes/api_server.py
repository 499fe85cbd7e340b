"""An API server that knows a few objects, for what a chart looks up in its cluster."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml

KINDS = {
    "v1": ("Pod", "Service"),
    "apps/v1": ("Deployment", "StatefulSet"),
    "autoscaling/v2": ("HorizontalPodAutoscaler",),
    "leaderworkerset.x-k8s.io/v1": ("LeaderWorkerSet",),
    "monitoring.coreos.com/v1": ("PrometheusRule", "ServiceMonitor"),
    "networking.k8s.io/v1": ("NetworkPolicy",),
    "policy/v1": ("PodDisruptionBudget",),
}
ABSENT = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound"}


def _plural(kind: str) -> str:
    return f"{kind.lower().removesuffix('y')}{'ies' if kind.endswith('y') else 's'}"


def _documents(objects: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return what is served, by path: the discovery documents and the objects."""
    groups = []
    found: dict[str, dict[str, Any]] = {
        "/version": {"major": "1", "minor": "37", "gitVersion": "v1.37.0"},
        "/api": {"kind": "APIVersions", "versions": ["v1"]},
        "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups},
    }
    for version, kinds in KINDS.items():
        group, _, name = version.rpartition("/")
        if group:
            served = {"groupVersion": version, "version": name}
            groups.append({"name": group, "versions": [served], "preferredVersion": served})
        resources = [
            {"name": _plural(kind), "kind": kind, "namespaced": True, "verbs": ["get"]}
            for kind in kinds
        ]
        found[_root(version)] = {
            "kind": "APIResourceList",
            "apiVersion": "v1",
            "groupVersion": version,
            "resources": resources,
        }
    for item in objects:
        named = item["metadata"]
        path = f"namespaces/{named['namespace']}/{_plural(item['kind'])}/{named['name']}"
        found[f"{_root(item['apiVersion'])}/{path}"] = item
    return found


def _root(version: str) -> str:
    return f"/apis/{version}" if "/" in version else f"/api/{version}"


@contextmanager
def cluster_with(objects: list[dict[str, Any]], folder: Path) -> Iterator[Path]:
    """Serve `objects` on loopback; yields the path of a kubeconfig in `folder`."""
    documents = _documents(objects)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = documents.get(self.path.partition("?")[0])
            body = json.dumps(ABSENT | {"code": 404} if found is None else found).encode()
            self.send_response(404 if found is None else 200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    kubeconfig = folder / "kubeconfig"
    address = f"http://127.0.0.1:{server.server_port}"
    kubeconfig.write_text(
        yaml.safe_dump(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "clusters": [{"name": "test", "cluster": {"server": address}}],
                "users": [{"name": "test", "user": {}}],
                "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
                "current-context": "test",
            }
        )
    )
    try:
        yield kubeconfig
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
