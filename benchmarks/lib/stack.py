"""Outrider's services as processes."""

from __future__ import annotations

import contextlib
import json
import shlex
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from benchmarks.lib.client import Client, Job
from benchmarks.lib.processes import Child, ProcessError, module_child
from benchmarks.lib.records import Run, TokenIds
from outrider.cli.ports import HOST
from outrider.methods import HIDDEN_STATE_METHODS
from scorer_service.drafting.in_process import POOL

_RPC_TIMEOUT_S: Final = 10.0
_ATTACH_TIMEOUT_S: Final = 30.0
_PROXY_HOST: Final = "127.0.0.2"


@dataclass(frozen=True)
class Route:
    """The way of proposers to their scorer, and the GPU that they run on."""

    name: str = "default"  # also the pool of the proposers
    unix: bool = False  # over the scorer's Unix socket
    proxied: bool = False  # through the delay proxy
    flags: tuple[str, ...] = ()  # of these proposers alone
    gpu: str | None = None  # CUDA_VISIBLE_DEVICES


@dataclass(frozen=True)
class StackConfig:
    """Settings of the services. Models are folders in Hugging Face format, or "embedded"."""

    model: str
    draft_model: str
    dtype: str
    num_speculative_tokens: int
    start_timeout_s: float
    draft_dtype: str = "float32"
    methods: tuple[str, ...] = ("draft_model",)
    device: str = "cpu"
    scorer_gpu: str | None = None  # CUDA_VISIBLE_DEVICES
    scorer_memory: float = 0.3  # part of the GPU
    scorer_flags: tuple[str, ...] = ()
    proposer_flags: tuple[str, ...] = ()
    in_process: bool = False  # the scorer drafts by its one method
    unix: bool = False  # the scorer listens on a Unix socket
    proxy: bool = False  # a delay proxy stands before the scorer


class Stack:
    """A scorer with its gateway and proxy. Processes are added to `children`."""

    def __init__(self, config: StackConfig, children: list[Child], log_dir: Path) -> None:
        self.config = config
        self._children = children
        self._log_dir = log_dir
        self._socket = log_dir / "scorer.sock"
        self._attached: Counter[str] = Counter(config.methods if config.in_process else ())
        scorer = self._start(
            "scorer",
            "scorer_service",
            *("--port", 0, "--data-port", 0, *_scorer_flags(config)),
            *(("--in-process-proposer", _method_flags(config)) if config.in_process else ()),
            *(("--listen-unix", self._socket) if config.unix else ()),
            gpu=config.scorer_gpu,
        )
        ready = scorer.ready(config.start_timeout_s)
        self._scorer_at, self._metrics_url = ready["grpc"], ready["metrics"]
        if config.proxy:
            # It takes the ports of the scorer on another loopback address.
            command = ["benchmarks.lib.delay_proxy", "--host", _PROXY_HOST]
            command += ["--target", self._scorer_at, "--target", ready["data"]]
            self._proxy = self._spawn("proxy", [*command], {})
            self._proxy_at = self._proxy.ready(config.start_timeout_s)["address"]
        flags = ("--scorer", self._scorer_at, "--http-port", 0, "--grpc-port", 0)
        gateway = self._start("gateway", "gateway", *flags, "--model", config.model)
        self.client = Client(self._scorer_at, gateway.ready(config.start_timeout_s)["grpc"])

    def close(self) -> None:
        """Close the client. The owner of `children` stops the processes."""
        self.client.close()

    def attach(self, route: Route = Route()) -> list[Child]:
        """Start a proposer for each method and wait until the scorer uses them."""
        config = self.config
        proposers = [
            self._start(
                f"proposer-{route.name}-{method}",
                "proposer_service",
                *("--scorer", self._dialled(route), "--pool", route.name, "--port", 0),
                *("--method", method, "--threads", 1),
                *_model_flags(config, method),
                *route.flags,
                gpu=route.gpu,
            )
            for method in config.methods
        ]
        for proposer in proposers:
            proposer.ready(config.start_timeout_s)
        self._attached += Counter(config.methods)
        self.require_proposers()
        return proposers

    @contextlib.contextmanager
    def attached(self, route: Route) -> Iterator[None]:
        """Keep the proposers of `route` attached within the context."""
        proposers = self.attach(route)
        try:
            yield
        finally:
            for proposer in proposers:
                proposer.stop()
                self._children.remove(proposer)
            self._attached -= Counter(self.config.methods)
            self.require_proposers()

    def require_proposers(self) -> None:
        """Wait until exactly the attached proposers are in use. Raises `ProcessError`."""
        deadline = time.monotonic() + _ATTACH_TIMEOUT_S
        while True:
            info = self.client.info()
            alive = Counter(
                p.method
                for p in info.proposers
                if not p.set_aside and p.proposer_id.endswith(POOL) == self.config.in_process
            )
            if alive == self._attached:
                return
            if time.monotonic() > deadline:
                found, wanted = dict(alive), dict(self._attached)
                raise ProcessError(f"proposers attached: {found}; wanted: {wanted}")
            time.sleep(0.2)

    def set_round_trip(self, milliseconds: float) -> None:
        """Set the round trip that the proxy adds."""
        self._ask_proxy({"delay_s": milliseconds / 2e3})

    def proxied_bytes(self) -> dict[str, int]:
        """Return the bytes that the proxy forwarded `to` the scorer and `from` it."""
        return self._ask_proxy({}) if self.config.proxy else {"to": 0, "from": 0}

    def sent_bytes(self) -> dict[str, float]:
        """Return bytes so far: of hidden `states` that the scorer sent, and `proxied_bytes`."""
        found = [s for s in samples(self._metrics_url) if s.name == "outrider:feature_bytes_total"]
        return {"states": sum(s.value for s in found), **self.proxied_bytes()}

    def step_seconds(self) -> dict[str, float]:
        """Return the seconds of the scorer's steps so far by part, and their number, `steps`.

        `gap` is the time between a result and the next launch, `gaps` the number of gaps.
        """
        seconds: dict[str, float] = {}
        for sample in samples(self._metrics_url):
            part = sample.labels.get("part", "")
            if sample.name == "outrider:step_time_seconds_sum":
                seconds[part] = sample.value
            if sample.name == "outrider:step_time_seconds_count":
                seconds["gaps" if part == "gap" else "steps"] = sample.value
        return seconds

    def _start(self, name: str, module: str, *args: object, gpu: str | None = None) -> Child:
        env = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}
        return self._spawn(name, [module, "--host", HOST, "--exit-with-parent", *args], env)

    def _spawn(self, name: str, command: list[object], env: dict[str, str]) -> Child:
        kind = "in-process" if self.config.in_process else self.config.dtype
        name = f"outrider-{kind}-{name}"
        return module_child(name, command, self._log_dir, self._children, env)

    def _dialled(self, route: Route) -> str:
        if route.unix:
            return f"unix:{self._socket}"
        return self._proxy_at if route.proxied else self._scorer_at

    def _ask_proxy(self, changes: dict[str, float]) -> dict[str, int]:
        self._proxy.write(json.dumps(changes))
        answer: dict[str, int] = json.loads(self._proxy.line(_RPC_TIMEOUT_S))
        return answer


@dataclass(frozen=True)
class OutriderSystem:
    """A stack that is asked with one method."""

    name: str
    stack: Stack
    method: str  # "none", or one of the stack's
    concurrencies: frozenset[int]
    timeout_s: float
    temperature: float = 0.0

    def run(self, prompts: Sequence[TokenIds], max_tokens: int, concurrency: int) -> Run:
        """See `System.run`. The i-th prompt has seed i."""
        completions, wall_s = self.stack.client.generate(
            [
                Job(prompt, max_tokens, self.method, self.temperature, seed)
                for seed, prompt in enumerate(prompts)
            ],
            concurrency,
            timeout_s=self.timeout_s,
        )
        names = ("rounds", "drafted", "accepted")
        counts = (int(sum(c.stats[name] for c in completions)) for name in names)
        return Run(completions, wall_s, *counts)


def samples(url: str) -> list[Sample]:
    """Return the metrics of a process. Raises `ProcessError`."""
    try:
        with urllib.request.urlopen(url, timeout=_RPC_TIMEOUT_S) as answer:
            families = text_string_to_metric_families(answer.read().decode())
    except OSError as error:
        raise ProcessError(f"metrics at {url}: {error}") from None
    return [sample for family in families for sample in family.samples]


def _scorer_flags(config: StackConfig) -> tuple[str, ...]:
    memory = ("--gpu-memory-utilization", str(config.scorer_memory))
    return (
        *("--model", config.model, "--dtype", config.dtype),
        *("--num-speculative-tokens", str(config.num_speculative_tokens)),
        *("--threads", "2"),
        "--no-enable-prefix-caching",  # the same prompts come again and again
        *_device(config.device),
        *(memory if config.device != "cpu" else ()),
        *config.scorer_flags,
    )


def _model_flags(config: StackConfig, method: str) -> tuple[str, ...]:
    if method == "draft_model":
        model = ("--model", config.draft_model, "--dtype", config.draft_dtype)
    elif method in HIDDEN_STATE_METHODS:
        model = ("--model", config.draft_model, "--target-model", config.model)
    else:
        return ()
    return (*model, *_device(config.device), *config.proposer_flags)


def _method_flags(config: StackConfig) -> str:
    (method,) = config.methods
    return shlex.join(("--method", method, *_model_flags(config, method)))


def _device(name: str) -> tuple[str, ...]:
    return () if name == "cpu" else ("--device", name)
