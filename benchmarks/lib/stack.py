"""Outrider as its users meet it: three services as processes, driven over gRPC."""

from __future__ import annotations

import asyncio
import json
import shlex
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from benchmarks.lib.processes import Child, ProcessError, python_path
from benchmarks.lib.records import Completion, Run, TokenIds
from outrider.cli.specs import HOST
from outrider.cli.stack import free_port
from outrider.methods import HIDDEN_STATE_METHODS
from outrider.rpc.channel import open_channel
from outrider.v1 import common_pb2, generation_pb2, generation_pb2_grpc, scorer_pb2
from outrider.v1.scorer_pb2_grpc import ScorerServiceStub
from scorer_service.drafting.in_process import POOL

METHODS = ("draft_model", "ngram")
_RPC_TIMEOUT_S = 10.0
_SOCKET = "scorer.sock"
_STATS = (
    *("rounds", "drafted", "accepted", "hits", "misses_late", "misses_wrong", "waits"),
    *("wait_ms", "fallback_rounds", "queue_ms", "prefill_ms", "propose_ms", "score_ms"),
    *("network_ms", "cached_prompt_tokens"),
)


@dataclass(frozen=True)
class Route:
    """How the proposers of a pool come to the scorer."""

    pool: str = "default"
    unix: bool = False  # by the scorer's Unix socket
    round_trip_ms: float = 0.0  # added, if not


@dataclass(frozen=True)
class StackConfig:
    """What to start. Paths are folders in Hugging Face format, or "embedded"."""

    model: str
    draft_model: str
    dtype: str
    num_speculative_tokens: int
    scorer_threads: int
    proposer_threads: int
    start_timeout_s: float
    draft_dtype: str = "float32"
    methods: tuple[str, ...] = METHODS
    device: str = "cpu"
    scorer_module: str = "scorer_service"
    scorer_flags: tuple[str, ...] = ()
    proposer_flags: tuple[str, ...] = ()
    wrapper: tuple[str, ...] = ()  # a module that runs the services' modules
    env: tuple[tuple[str, str], ...] = ()
    routes: tuple[Route, ...] = (Route(),)  # each of a proposer of each method
    start_together: bool = False  # where no scorer measures what memory a GPU has left
    max_sessions: int = 256  # of each proposer
    in_process: bool = False  # the scorer drafts, by its one method

    @property
    def process_env(self) -> dict[str, str]:
        """A wrapper may load torch before the scorer can say how it is to share the cores."""
        wrapped = {
            **python_path(),  # where it is found
            "OMP_NUM_THREADS": str(self.scorer_threads),
            "GOMP_SPINCOUNT": "10000",
        }
        return (wrapped if self.wrapper else {}) | dict(self.env)


@dataclass(frozen=True)
class Job:
    """One request. End-of-sequence is ignored: it yields `max_tokens`."""

    prompt: TokenIds
    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    num_speculative_tokens: int | None = None  # K; None: the scorer's
    pool: str = ""  # of the proposers that draft, where the wrapper is `benchmarks.by_pool`


class Stack:
    """A scorer, a proposer of each method, and a gateway. Children are added to `children`."""

    def __init__(self, config: StackConfig, children: list[Child], log_dir: Path) -> None:
        self.config = config
        self._children = children
        self._log_dir = log_dir
        self._runner = asyncio.Runner()
        # Fixed: others are told them before the scorer is ready.
        scorer_grpc, scorer_data = (f"{HOST}:{free_port()}" for _ in range(2))
        scorer = self._start(
            "scorer",
            config.scorer_module,
            *("--port", scorer_grpc.rpartition(":")[2]),
            *("--data-port", scorer_data.rpartition(":")[2], *scorer_flags(config)),
            *(("--in-process-proposer", method_flags(config)) if config.in_process else ()),
            *(("--listen-unix", log_dir / _SOCKET) if any(r.unix for r in config.routes) else ()),
        )
        if not config.start_together:
            self.metrics_url = scorer.ready(config.start_timeout_s)["metrics"]
        dialled_by = {
            route: self._dialled(route, f"127.0.0.{number}", scorer_grpc, scorer_data)
            for number, route in enumerate(config.routes, start=2)
            if not config.in_process
        }
        proposers = [
            self._start(
                f"proposer-{route.pool}-{method}",
                "proposer_service",
                *("--scorer", dialled, "--pool", route.pool),
                *("--method", method, "--port", 0, "--threads", config.proposer_threads),
                *("--max-sessions", config.max_sessions),
                *model_flags(config, method),
            )
            for route, dialled in dialled_by.items()
            for method in config.methods
        ]
        gateway = self._start(
            "gateway",
            "gateway",
            *("--scorer", scorer_grpc, "--http-port", 0, "--grpc-port", 0),
            *("--model", config.model),
        )
        if config.start_together:
            self.metrics_url = scorer.ready(config.start_timeout_s)["metrics"]
        for proposer in proposers:
            proposer.ready(config.start_timeout_s)
        gateway_grpc = gateway.ready(config.start_timeout_s)["grpc"]
        self._runner.run(self._connect(scorer_grpc, gateway_grpc))

    def close(self) -> None:
        """Close the channels; the processes are their owner's to stop."""
        self._runner.run(self._disconnect())
        self._runner.close()

    def require_proposers(self, timeout_s: float = 30.0) -> None:
        """Wait until all proposers are attached and in use. Raises `ProcessError` if not."""
        deadline = time.monotonic() + timeout_s
        while True:
            info = self._runner.run(self._info())
            # Beside those of its own, a scorer of feature_path.py drafts itself.
            alive = Counter(
                p.method
                for p in info.proposers
                if not p.set_aside and p.proposer_id.endswith(POOL) == self.config.in_process
            )
            wanted = Counter(self.config.methods * len(self.config.routes))
            if alive >= wanted:
                return
            if time.monotonic() > deadline:
                raise ProcessError(f"proposers attached: {dict(alive)}; wanted: {dict(wanted)}")
            time.sleep(0.2)

    def step_seconds(self) -> dict[str, float]:
        """Seconds the scorer's steps spent so far by part, and `steps`, their number.

        `gap`, where the scorer tells it: from a result to the next launch, `gaps` of them.
        """
        seconds: dict[str, float] = {}
        for sample in self.metrics():
            part = sample.labels.get("part", "")
            if sample.name == "outrider:step_time_seconds_sum":
                seconds[part] = sample.value
            if sample.name == "outrider:step_time_seconds_count":
                seconds["gaps" if part == "gap" else "steps"] = sample.value
        return seconds

    def metrics(self) -> list[Sample]:
        """What the scorer exports now."""
        with urllib.request.urlopen(self.metrics_url, timeout=_RPC_TIMEOUT_S) as answer:
            text = answer.read().decode()
        return [s for family in text_string_to_metric_families(text) for s in family.samples]

    def generate(
        self,
        jobs: Sequence[Job],
        concurrency: int,
        *,
        method: str,
        timeout_s: float,
        through_gateway: bool = True,
    ) -> tuple[tuple[Completion, ...], float]:
        """Run all jobs with `concurrency` in flight; returns completions and seconds."""

        def call(job: Job) -> object:
            return self._call(job, method, timeout_s, through_gateway=through_gateway)

        return self._runner.run(_run_all(call, jobs, concurrency))

    def generate_for(
        self, jobs: Iterator[Job], seconds: float, in_flight: int, *, method: str, timeout_s: float
    ) -> tuple[int, int]:
        """Start jobs for `seconds`, `in_flight` at once; returns how many, and their tokens."""
        deadline = time.monotonic() + seconds
        done: list[int] = []

        async def work() -> None:
            while time.monotonic() < deadline:
                completion = await _consume(self._call(next(jobs), method, timeout_s))
                done.append(len(completion.token_ids))

        async def run() -> None:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(in_flight):
                    tasks.create_task(work())

        self._runner.run(run())
        return len(done), sum(done)

    def _call(
        self, job: Job, method: str, timeout_s: float, *, through_gateway: bool = True
    ) -> object:
        speculation = common_pb2.SpeculationParams(
            enabled=method != "none",
            method=method,
            num_speculative_tokens=job.num_speculative_tokens,
        )
        stop = common_pb2.StopParams(max_tokens=job.max_tokens, ignore_eos=True)
        sampling = common_pb2.SamplingParams(temperature=job.temperature, top_p=job.top_p)
        if not through_gateway:
            return self._scorer.Generate(
                scorer_pb2.ScorerServiceGenerateRequest(
                    prompt_token_ids=job.prompt,
                    sampling=sampling,
                    stop=stop,
                    speculation=speculation,
                    tenant=job.pool,
                ),
                timeout=timeout_s,
            )
        return self._gateway.Generate(
            generation_pb2.GenerateRequest(
                tokens=generation_pb2.TokenPrompt(token_ids=job.prompt),
                sampling=sampling,
                stop=stop,
                speculation=speculation,
                aux_info=True,
            ),
            timeout=timeout_s,
        )

    def _start(self, name: str, module: str, *args: object) -> Child:
        modules = (*self.config.wrapper, module)
        command = [sys.executable, "-P", "-m", *modules, "--host", HOST, "--exit-with-parent"]
        kind = "in-process" if self.config.in_process else self.config.dtype
        name = f"outrider-{kind}-{name}"
        command += map(str, args)
        child = Child(name, command, self._log_dir, env=self.config.process_env)
        self._children.append(child)
        return child

    def _dialled(self, route: Route, proxy_host: str, grpc: str, data: str) -> str:
        """What proposers dial; for a round trip to add it is a proxy."""
        if route.unix:
            return f"unix:{self._log_dir / _SOCKET}"
        if not route.round_trip_ms:
            return grpc
        command = [sys.executable, "-P", "-m", "benchmarks.lib.delay_proxy", "--host", proxy_host]
        command += ["--target", grpc, "--target", data]
        proxy = Child(f"proxy-{route.pool}", command, self._log_dir, env=self.config.process_env)
        self._children.append(proxy)
        address = proxy.ready(self.config.start_timeout_s)["address"]
        proxy.write(json.dumps({"delay_s": route.round_trip_ms / 2e3}))
        proxy.line(_RPC_TIMEOUT_S)
        return address

    async def _connect(self, scorer: str, gateway: str) -> None:
        self._channels = [open_channel(scorer), open_channel(gateway)]
        self._scorer = ScorerServiceStub(self._channels[0])
        self._gateway = generation_pb2_grpc.GenerationServiceStub(self._channels[1])

    async def _disconnect(self) -> None:
        for channel in self._channels:
            await channel.close()

    async def _info(self) -> scorer_pb2.GetScorerInfoResponse:
        request = scorer_pb2.GetScorerInfoRequest()
        info: scorer_pb2.GetScorerInfoResponse = await self._scorer.GetScorerInfo(
            request, timeout=_RPC_TIMEOUT_S
        )
        return info


@dataclass(frozen=True)
class OutriderSystem:
    """One way of asking a stack."""

    name: str
    stack: Stack
    method: str  # "none", or one of the stack's
    concurrencies: frozenset[int]
    timeout_s: float
    through_gateway: bool = True
    num_speculative_tokens: int | None = None
    pool: str = ""
    temperature: float = 0.0
    top_p: float = 1.0

    def run(self, prompts: Sequence[TokenIds], max_tokens: int, concurrency: int) -> Run:
        """See `System.run`."""
        how = (self.temperature, self.top_p, self.num_speculative_tokens, self.pool)
        completions, wall_s = self.stack.generate(
            [Job(prompt, max_tokens, *how) for prompt in prompts],
            concurrency,
            method=self.method,
            timeout_s=self.timeout_s,
            through_gateway=self.through_gateway,
        )
        rounds, drafted, accepted = (
            int(sum(c.stats[name] for c in completions))
            for name in ("rounds", "drafted", "accepted")
        )
        return Run(completions, wall_s, rounds, drafted, accepted)


async def _run_all(
    call: Callable[[Job], object], jobs: Sequence[Job], concurrency: int
) -> tuple[tuple[Completion, ...], float]:
    slots = asyncio.Semaphore(concurrency)

    async def one(job: Job) -> Completion:
        async with slots:
            return await _consume(call(job))

    start = time.perf_counter()
    completions = await asyncio.gather(*map(one, jobs))
    return tuple(completions), time.perf_counter() - start


async def _consume(stream: object) -> Completion:
    start = time.perf_counter()
    token_ids: list[int] = []
    arrivals: list[float] = []
    aux = common_pb2.AuxInfo()
    async for message in stream:  # type: ignore[attr-defined]
        if isinstance(message, generation_pb2.GenerateResponse):
            new = [token.id for token in message.tokens]
        else:
            new = list(message.token_ids)
        if new:
            token_ids += new
            arrivals.append(time.perf_counter())
        if message.HasField("aux_info"):
            aux = message.aux_info
    total_s = time.perf_counter() - start
    if not arrivals or not aux.output_len:
        raise ProcessError("a request ended without tokens or without aux_info")
    return Completion(
        tuple(token_ids),
        total_s,
        ttft_s=arrivals[0] - start,
        stats={name: float(getattr(aux, name)) for name in _STATS}
        | {"undrafted_rounds": float(aux.k_histogram[0] if aux.k_histogram else aux.rounds)},
        accepted_per_pos=tuple(aux.accepted_per_pos),
        round_gaps_s=tuple(b - a for a, b in pairwise(arrivals)),
    )


def scorer_flags(config: StackConfig) -> tuple[str, ...]:
    """What a scorer is told of the model and the engine."""
    return (
        *("--model", config.model, "--dtype", config.dtype),
        *("--num-speculative-tokens", str(config.num_speculative_tokens)),
        *("--threads", str(config.scorer_threads)),
        "--no-enable-prefix-caching",  # the same prompts come again and again
        *_device(config.device),
        *config.scorer_flags,
    )


def model_flags(config: StackConfig, method: str) -> tuple[str, ...]:
    """Of a proposer with a model; one that reads hidden states knows its dtype best."""
    if method == "draft_model":
        model = ("--model", config.draft_model, "--dtype", config.draft_dtype)
    elif method in HIDDEN_STATE_METHODS:
        model = ("--model", config.draft_model, "--target-model", config.model)
    else:
        return ()
    return (*model, *_device(config.device), *config.proposer_flags)


def method_flags(config: StackConfig) -> str:
    """Of the one method, quoted, for a scorer that drafts by it."""
    (method,) = config.methods
    return shlex.join(("--method", method, *model_flags(config, method)))


def _device(name: str) -> tuple[str, ...]:
    return () if name == "cpu" else ("--device", name)
