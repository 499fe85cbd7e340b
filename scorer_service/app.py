"""A scorer process: builds the engine on its own thread, then serves it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import grpc
import transformers

from outrider.config import EngineConfig
from outrider.device import device_id
from outrider.drafting.building.config import MethodConfig
from outrider.drafting.building.methods import build_proposer
from outrider.engine.engine import Engine
from outrider.engine.hidden_states.streams import MAX_AHEAD_BYTES, HiddenStateStreams
from outrider.engine.model.parallel.ranks import RankGroup, Ranks
from outrider.engine.policy.adaptive import AdaptivePolicy
from outrider.engine.policy.base import Policy
from outrider.engine.policy.fixed import FixedPolicy
from outrider.engine.worker import EngineWorker
from outrider.errors import ConfigError, DeadlineError, InternalError
from outrider.models.resolve import resolve_model
from outrider.models.tokenizer import hash_if_any
from outrider.params import SamplingParams, SpeculationParams, StopParams
from outrider.rpc import runtime
from outrider.rpc.data_connection import DataPort
from outrider.rpc.deployment import Deployment
from outrider.rpc.server import GrpcServer
from outrider.rpc.targets import join_address
from outrider.rpc.tasks import first_of, in_thread
from outrider.rpc.telemetry import Telemetry, configure
from outrider.types import Request, StepEvents
from scorer_service.config import DraftLimits, ServedModel
from scorer_service.constraints import Constraints
from scorer_service.drafting.in_process import InProcessProposer
from scorer_service.drafting.in_process_link import attach
from scorer_service.gauges import watch
from scorer_service.hub import Hub
from scorer_service.loading import join, load
from scorer_service.metrics import ScorerMetrics
from scorer_service.registration import add_to_server
from scorer_service.servicer import SERVICE_NAME, ScorerServicer, Serving

NAME: Final = "scorer"
_STOP_TIMEOUT_S = 1.0
POLICIES: dict[str, Callable[[int], Policy]] = {
    "adaptive": AdaptivePolicy,
    # Longer than a draft takes on a busy machine: what is to be compared is not to come late.
    "fixed": partial(FixedPolicy, max_wait_s=1.0),
    "off": lambda _: FixedPolicy(0),
}


@dataclass(frozen=True, slots=True)
class Options:
    """The command line, resolved. Every field is a flag of `python -m scorer_service`."""

    host: str
    port: int
    data_port: int
    metrics_port: int
    model: str
    served_model_name: str
    scorer_id: str
    dtype: str
    device: str
    attention_backend: str | None
    threads: int
    num_speculative_tokens: int
    speculation_policy: str
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int | None
    kv_cache_memory: int | None  # MiB; None: all of gpu_memory_utilization that is left
    gpu_memory_utilization: float
    page_size: int
    enable_prefix_caching: bool
    hidden_features: str | None
    listen_unix: str | None
    start_timeout: float  # seconds
    in_process_proposer: tuple[MethodConfig, ...]
    deployment: Deployment
    ranks: Ranks | None
    """This process among those of its replica, not a flag; None: it is the replica."""


class ScorerApp:
    """Implements `outrider.rpc.runtime.Service`."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._telemetry: Telemetry = configure("outrider-scorer")
        self._servicer = ScorerServicer(self._telemetry)
        deployment = options.deployment
        self._server = GrpcServer(
            join_address(options.host, options.port),
            self._register,
            [SERVICE_NAME],
            unix_path=options.listen_unix,
            health_address=deployment.health_address(options.host),
            tls=deployment.tls,
        )
        self._data_port = DataPort(
            options.host, options.data_port, unix_path=options.listen_unix, tls=deployment.tls
        )
        self._worker: EngineWorker | None = None
        self._group: RankGroup | None = None
        self._hub: Hub | None = None
        self._constraints: Constraints | None = None

    async def start(self) -> dict[str, str]:
        """Listen at once (health says NOT_SERVING), loads the model, then serves."""
        options = self._options
        if options.ranks is not None and options.in_process_proposer:
            raise ConfigError(
                "--in-process-proposer is for a replica of one rank: start a proposer beside it."
            )
        port = await self._server.start()
        data_port = await self._data_port.start()
        metrics_url = self._telemetry.serve_metrics(options.host, options.metrics_port)
        loop = asyncio.get_running_loop()
        found: list[tuple[Path, str]] = []  # the model's folder, its tokenizer's hash
        hubs: list[Hub] = []  # filled before the first request

        def on_events(events: StepEvents) -> None:
            if hubs:  # a start that is given up stops an engine that nobody listens to
                loop.call_soon_threadsafe(hubs[0].on_events, events)

        def build() -> Engine:
            folder = resolve_model(options.model, "target")  # maybe a download
            # Before the weights: a broken file is to be told at once.
            found.append((folder, hash_if_any(folder)))
            self._group = join(options)
            return build_engine(folder, options, self._group, beside)

        beside: InProcessProposer | None = None
        if options.in_process_proposer:
            say = partial(runtime.progress, NAME)
            beside = InProcessProposer(
                partial(build_proposer, options.in_process_proposer, options.max_num_seqs, say),
                f"{options.scorer_id}-in-process",
            )
        self._worker = worker = EngineWorker(build, on_events, beside)
        info = await asyncio.wrap_future(in_thread(lambda: worker.start(options.start_timeout)))
        folder, hash_ = found[0]
        if self._group is not None:
            self._group.watch(_end)
        served = ServedModel(
            scorer_id=options.scorer_id,
            model=options.model,
            served_model_name=options.served_model_name,
            tokenizer_hash=hash_,
            vocab_size=info.vocab_size,
            max_model_len=info.max_model_len,
            dtype=options.dtype,
            eos_token_ids=info.eos_token_ids,
            num_speculative_tokens=info.num_speculative_tokens,
            features=info.features,
            device=device_id(options.device) if options.ranks is None else "",
        )
        metrics = ScorerMetrics(self._telemetry.registry, options.served_model_name)
        limits = DraftLimits()
        self._hub = hub = Hub(worker, served, limits, metrics)
        watch(metrics, worker, hub.roster, served)
        hubs.append(hub)
        if beside is not None:
            attach(hub, worker, beside, served)
        self._constraints = await asyncio.wrap_future(
            in_thread(lambda: Constraints.load(folder, info))
        )
        shared = None if options.listen_unix is None else Path(options.listen_unix).parent
        self._servicer.begin(
            Serving(worker, hub, served, limits, self._constraints, shared, self._data_port)
        )
        await self._server.set_serving(True)
        address = join_address(options.host, port)
        runtime.progress(NAME, f"serving {options.served_model_name} on {address}")
        data = join_address(options.host, data_port)
        return {"grpc": address, "data": data, "metrics": metrics_url}

    async def stop(self) -> None:
        """New requests are refused at once; running ones get the grace period."""
        await self._server.set_serving(False)
        await self._servicer.drain(self._options.deployment.drain_grace_s)
        await self._server.stop(_STOP_TIMEOUT_S)
        await self._data_port.stop()
        worker = self._worker
        if worker is not None:
            # A model that is still loading cannot be interrupted; its thread is a daemon.
            with contextlib.suppress(DeadlineError):
                await asyncio.wrap_future(in_thread(lambda: worker.stop(_STOP_TIMEOUT_S)))
        if self._group is not None:
            with contextlib.suppress(TimeoutError):  # a rank that hangs ends without us
                stopped = asyncio.wrap_future(in_thread(self._group.stop))
                await asyncio.wait_for(stopped, _STOP_TIMEOUT_S)
        if self._constraints is not None:
            self._constraints.close()
        self._telemetry.shutdown()

    async def wait_failed(self) -> None:
        """Return once the engine fails step after step, or hangs."""
        assert self._hub is not None
        assert self._worker is not None
        await first_of(self._hub.failed.wait(), self._worker.until_hung())

    def _register(self, server: grpc.aio.Server) -> None:
        add_to_server(self._servicer, server)


def _end(reason: str) -> None:
    # As if killed, which gateways survive: nothing that runs can be finished, and the engine's
    # thread may hang in a collective for ever.
    runtime.progress(NAME, f"this replica cannot go on: {reason}")
    os._exit(1)


def build_engine(
    folder: Path,
    options: Options,
    group: RankGroup | None = None,
    beside: InProcessProposer | None = None,
) -> Engine:
    """Load, checks and warms up, also what drafts beside it on the engine's thread: this one.

    Raises `OutriderError`s.
    """
    began = time.perf_counter()
    transformers.utils.logging.disable_progress_bar()  # our own lines say it
    runtime.progress(NAME, f"loading {options.model} as {options.dtype} on {options.device}")
    beside_it = () if beside is None else (beside.build,)
    model, runner, step_times = load(folder, options, group, *beside_it)
    config = EngineConfig(
        page_size=options.page_size,
        num_pages=model.num_pages,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_model_len=model.max_model_len,
        num_speculative_tokens=options.num_speculative_tokens,
        enable_prefix_caching=options.enable_prefix_caching,
    )
    policy = POLICIES[options.speculation_policy](options.num_speculative_tokens)
    for rows, tokens, seconds in step_times:
        policy.measured.costs.observe_step(rows, tokens, seconds)
    pool = model.pools.features
    ahead = 0 if options.device == "cpu" else MAX_AHEAD_BYTES
    engine = Engine(
        model,
        config,
        eos_token_ids=model.eos_token_ids,
        policy=policy,
        runner=runner,
        features=None if pool is None else HiddenStateStreams(pool, max_ahead_bytes=ahead),
    )
    if beside is not None:
        beside.bring(engine)
    loaded = time.perf_counter()
    runtime.progress(
        NAME,
        f"loaded in {loaded - began:.1f} s; KV cache "
        f"{model.num_pages * model.kv_bytes_per_page // 2**20} MiB = "
        f"{model.num_pages * options.page_size} tokens; warming up",
    )
    _warm_up(engine, config)
    # What loading leaves is there to stay; a full collection that looks at it takes 0.2 s.
    gc.collect()
    gc.freeze()
    runtime.progress(NAME, f"warmed up in {time.perf_counter() - loaded:.1f} s")
    return engine


def _warm_up(engine: Engine, config: EngineConfig) -> None:
    """Run each size of step that a single request meets, so that no client pays for the first.

    Verification of k draft tokens and processing k + 1 prompt tokens are the same forward.
    """
    longest = min(config.max_num_batched_tokens, config.max_model_len - 2)
    for length in (*range(1, config.num_speculative_tokens + 2), longest):
        for temperature in (0.0, 1.0):
            engine.submit(
                Request(
                    session_id=0,  # the hub's begin at 1
                    prompt_token_ids=(0,) * min(length, longest),
                    sampling=SamplingParams(temperature=temperature),
                    stop=StopParams(max_tokens=2, ignore_eos=True),
                    speculation=SpeculationParams(enabled=False),
                )
            )
            while engine.snapshot().running or engine.snapshot().waiting:
                events = engine.step()
                if events is not None and events.failures:
                    raise InternalError(f"warm-up failed: {events.failures[0].error}")
