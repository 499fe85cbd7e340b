"""The pods of the chart's CPU example as processes on loopback: same flags, ports and probes.

Each pod has an address of its own in 127.0.0.0/8, so that the ports are the chart's, too. What
differs: the tiny models, the threads, and a list of addresses where the chart names a service,
because a test has no name server. All of them speak mutual TLS, as with `tls.enabled`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.rpc.channel import open_channel
from outrider.v1 import scorer_pb2, scorer_pb2_grpc
from tests.support.services.certificates import Issuer
from tests.support.services.certificates import flags as tls_flags

EXAMPLE = Path(__file__).parents[3] / "k8s/examples/rendered/cpu-demo.yaml"
_MODULES = {"scorer": "scorer_service", "proposer": "proposer_service", "gateway": "gateway"}
_READY_S = 240.0  # several start at the same time on two busy cores
_GONE_S = 60.0


@dataclass(frozen=True)
class Template:
    """A container as the chart renders it."""

    name: str  # scorer, gateway, or the pool
    module: str
    args: tuple[str, ...]
    probe: dict[str, Any]  # readinessProbe


@dataclass
class Pod:
    """A running process, or one that has ended."""

    template: Template
    name: str
    ip: str
    process: subprocess.Popen[bytes]
    log: Path

    async def ready(self) -> bool:
        """What its readinessProbe says."""
        if http := self.template.probe.get("httpGet"):
            with contextlib.suppress(httpx.TransportError):
                async with httpx.AsyncClient() as client:
                    url = f"http://{self.ip}:8000{http['path']}"
                    return (await client.get(url, timeout=3)).status_code == 200
            return False
        probe = self.template.probe["grpc"]
        request = health_pb2.HealthCheckRequest(service=probe["service"])
        async with open_channel(f"{self.ip}:{probe['port']}") as channel:
            try:
                answer = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=3)
            except grpc.aio.AioRpcError:
                return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    async def until_ready(self) -> None:
        async with asyncio.timeout(_READY_S):
            while not await self.ready():
                assert self.process.poll() is None, f"{self.name} ended:\n{self.log.read_text()}"
                await asyncio.sleep(0.1)

    async def terminate(self) -> None:
        """SIGTERM, as the kubelet sends it; returns when the process has ended, orderly."""
        self.process.send_signal(signal.SIGTERM)
        code = await asyncio.to_thread(self.process.wait, _GONE_S)
        assert code == 0, f"{self.name} ended with {code}:\n{self.log.read_text()}"


class Cluster:
    """Starts and ends pods."""

    def __init__(self, folder: Path, target: Path, draft: Path, scorers: int) -> None:
        self._folder = folder
        self._models = {"scorer": target, "proposer": draft, "gateway": target}
        self._templates = {t.name: t for t in _templates()}
        # Runs of two processes at the same time do not meet: each has a network of its own.
        self._network = f"127.{1 + os.getpid() // 256 % 254}.{os.getpid() % 256}"
        self._ips = itertools.count(100)
        self.scorer_ips = [f"{self._network}.{10 + n}" for n in range(scorers)]
        self.pods: list[Pod] = []
        self._issuer = Issuer()
        self.renew_certificates()

    def renew_certificates(self) -> None:
        """Puts a new one where all pods look for theirs."""
        self._tls = self._issuer.write(self._folder / "tls", *self.scorer_ips)

    async def scorer_info(self, scorer: Pod) -> scorer_pb2.GetScorerInfoResponse:
        """What a scorer says about itself."""
        async with open_channel(f"{scorer.ip}:7001", self._tls) as channel:
            stub = scorer_pb2_grpc.ScorerServiceStub(channel)
            return await stub.GetScorerInfo(scorer_pb2.GetScorerInfoRequest(), timeout=10)

    def start(self, template_name: str, ip: str | None = None, flags: Sequence[str] = ()) -> Pod:
        """Starts a pod; it is not ready yet. `flags` follow the chart's, and replace them."""
        template = self._templates[template_name]
        ip = ip or f"{self._network}.{next(self._ips)}"
        name = f"{template_name}-{len(self.pods)}"
        log = self._folder / f"{name}.log"
        argv = [self._substituted(arg, template, name, ip) for arg in template.args]
        with log.open("wb") as out:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", template.module, *argv, *tls_flags(self._tls), *flags],
                stdout=out,
                stderr=out,
            )
        pod = Pod(template, name, ip, process, log)
        self.pods.append(pod)
        return pod

    def _substituted(self, arg: str, template: Template, name: str, ip: str) -> str:
        flag, _, value = arg.partition("=")
        if flag == "--host":
            value = ip
        elif flag == "--scorer":
            port = value.rpartition(":")[2]
            value = ",".join(f"{scorer}:{port}" for scorer in self.scorer_ips)
        elif flag == "--model":
            value = str(self._models.get(template.name, self._models["proposer"]))
        elif flag == "--threads":
            value = "1"
        return f"{flag}={value}".replace("$(POD_NAME)", name)

    def kill(self) -> None:
        for pod in self.pods:
            if pod.process.poll() is None:
                pod.process.kill()
                pod.process.wait(_GONE_S)


@contextlib.asynccontextmanager
async def cluster(folder: Path, target: Path, draft: Path, scorers: int) -> AsyncIterator[Cluster]:
    """No pods yet; none is left afterwards."""
    pods = Cluster(folder, target, draft, scorers)
    try:
        yield pods
    finally:
        await asyncio.to_thread(pods.kill)


def _templates() -> list[Template]:
    found = []
    for document in yaml.safe_load_all(EXAMPLE.read_text()):
        if document is None or document["kind"] not in ("Deployment", "StatefulSet"):
            continue
        pod = document["spec"]["template"]
        labels = pod["metadata"]["labels"]
        (container,) = pod["spec"]["containers"]
        component = labels["app.kubernetes.io/component"]
        found.append(
            Template(
                name=labels.get("outrider/pool", component),
                module=_MODULES[component],
                args=tuple(container["args"]),
                probe=container["readinessProbe"],
            )
        )
    return found
