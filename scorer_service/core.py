"""The engine, hub and drafting of one scorer, without the servers around them."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Final

import transformers

from outrider import start_times
from outrider.config import EngineConfig
from outrider.device import device_id
from outrider.draft_port import EarlyTokens
from outrider.drafting.building.methods import build_proposer
from outrider.engine.engine import Engine
from outrider.engine.engine_thread import EngineThread
from outrider.engine.hidden_states.streams import MAX_AHEAD_BYTES, HiddenStateStreams
from outrider.engine.model.loader import check_config
from outrider.engine.sampling.logprobs import MAX_VALUES
from outrider.engine_port import ServedEngine
from outrider.engines import VLLM, naming_vllm
from outrider.errors import DeadlineError, InternalError, UnsupportedModelError
from outrider.models.resolve import find_local, resolve_model
from outrider.models.tokenizer import hash_if_any
from outrider.params import SamplingParams, SpeculationParams, StopParams
from outrider.policy.adaptive import AdaptivePolicy
from outrider.policy.base import FixedPolicy, Policy
from outrider.rpc import runtime
from outrider.rpc.data_connection import DataPort
from outrider.rpc.tasks import first_of, in_thread
from outrider.rpc.telemetry import Telemetry
from outrider.step_times import StepSizes
from outrider.types import EngineInfo, Request, StepEvents
from outrider.vllm.engine import VllmEngine
from scorer_service.call import Serving
from scorer_service.config import DraftLimits, ScorerOptions, ServedModel
from scorer_service.constraints import Constraints
from scorer_service.drafting.in_process import InProcessProposer
from scorer_service.drafting.in_process_link import attach
from scorer_service.drafting.side import DraftSide, LocalDrafts, NoDrafts, RelayedDrafts
from scorer_service.hub import Hub
from scorer_service.loading import load
from scorer_service.metrics import EngineMetrics, ScorerMetrics

NAME: Final = "scorer"
POLICIES: Final[dict[str, Callable[[int], Policy]]] = {
    "adaptive": AdaptivePolicy,
    "fixed": FixedPolicy,
    "off": lambda _: FixedPolicy(0),
}


class ScorerCore:
    """Runs the engine on a thread of its own. Used on the event loop."""

    def __init__(self, options: ScorerOptions, telemetry: Telemetry) -> None:
        self._options = options
        self._telemetry = telemetry
        self._engine: ServedEngine | None = None
        self._hub: Hub | None = None
        self._constraints: Constraints | None = None

    async def check(self) -> None:
        """Raise `ConfigError`s and `UnsupportedModelError`s that need no weights to be read."""
        options = self._options
        if options.engine == VLLM:
            return  # which models it serves is vLLM's to say
        folder = find_local(options.model, "target")
        if folder is not None:
            with _naming_vllm():
                await asyncio.wrap_future(in_thread(partial(check_config, folder)))

    async def start(self, data_port: DataPort | None) -> Serving:
        """Load the model, and return the parts that serve it. Raises `OutriderError`s."""
        options = self._options
        loop = asyncio.get_running_loop()
        found: list[tuple[Path, str]] = []  # the model's folder, its tokenizer's hash
        hubs: list[Hub] = []  # filled before the first request

        def on_events(events: StepEvents) -> None:
            if hubs:  # a start that is given up stops an engine without a hub
                loop.call_soon_threadsafe(hubs[0].on_events, events)

        def on_early(early: EarlyTokens) -> None:
            if hubs:
                loop.call_soon_threadsafe(hubs[0].on_early, early)

        def find() -> Path:
            folder = resolve_model(options.model, "target")  # maybe a download
            # Read before the weights, so that a broken file is reported at once.
            found.append((folder, hash_if_any(folder)))
            return folder

        def build() -> Engine:
            return build_engine(find(), options, colocated)

        colocated = _in_process_proposer(options)
        engine: ServedEngine
        if options.engine == VLLM:
            engine = VllmEngine(find, options.for_vllm(), on_events)
        else:
            engine = thread = EngineThread(build, on_events, colocated, on_early)
        self._engine = engine
        with _naming_vllm():
            info = await asyncio.wrap_future(in_thread(lambda: engine.start(options.start_timeout)))
        if isinstance(engine, VllmEngine):
            await engine.warm_up(options.start_timeout)
            self._telemetry.registry.register(EngineMetrics("vllm:"))
        folder, tokenizer_hash = found[0]
        served = _served(options, info, tokenizer_hash)
        metrics = ScorerMetrics(self._telemetry.registry, options.served_model_name)
        limits = DraftLimits(max_sessions=info.max_num_seqs + info.max_waiting)
        self._hub = hub = Hub(engine, served, limits, metrics)
        _watch(metrics, engine, hub, served)
        hubs.append(hub)
        drafts: DraftSide = LocalDrafts(hub.blocks, data_port)
        if isinstance(engine, VllmEngine):
            drafts = RelayedDrafts(engine.draft_target) if engine.draft_target else NoDrafts()
        self._constraints = await asyncio.wrap_future(
            in_thread(lambda: Constraints.load(folder, info))
        )
        if colocated is not None:
            attach(hub.registry, thread, colocated, served)
        return Serving(engine, hub, served, info, self._constraints, drafts)

    async def stop(self, timeout_s: float) -> None:
        """Stop the engine's thread, and what else the start has begun."""
        await asyncio.wrap_future(in_thread(lambda: self.halt(timeout_s)))

    def halt(self, timeout_s: float) -> None:
        """Stop this process's own threads, on any thread."""
        if self._engine is not None:
            # A model that is still loading cannot be interrupted; its thread is a daemon.
            with contextlib.suppress(DeadlineError):
                self._engine.stop(timeout_s)
        if self._constraints is not None:
            self._constraints.close()

    async def wait_failed(self) -> None:
        """Return once the engine fails step after step, or hangs."""
        assert self._hub is not None
        assert self._engine is not None
        await first_of(self._hub.failed.wait(), self._engine.until_hung())


def _in_process_proposer(options: ScorerOptions) -> InProcessProposer | None:
    if not options.in_process_proposer or options.engine == VLLM:  # there its worker drafts
        return None
    say = partial(runtime.progress, NAME)
    return InProcessProposer(
        partial(build_proposer, options.in_process_proposer, options.max_num_seqs, say),
        f"{options.scorer_id}-in-process",
        # A GPU would have the first token later by more than a step's time.
        drafts_before_prompts=options.device == "cpu",
    )


def _served(options: ScorerOptions, info: EngineInfo, tokenizer_hash: str) -> ServedModel:
    return ServedModel(
        scorer_id=options.scorer_id,
        model=options.model,
        served_model_name=options.served_model_name,
        tokenizer_hash=tokenizer_hash,
        vocab_size=info.vocab_size,
        max_model_len=info.max_model_len,
        dtype=options.dtype,
        eos_token_ids=info.eos_token_ids,
        num_speculative_tokens=info.num_speculative_tokens,
        page_size=info.page_size,
        features=info.features,
        adapters=info.adapters,
        device=device_id(options.device),
        drafted_elsewhere=options.engine == VLLM,
    )


@contextlib.contextmanager
def _naming_vllm() -> Iterator[None]:
    """Name vLLM in a refusal of the native engine."""
    try:
        yield
    except UnsupportedModelError as error:
        raise naming_vllm(error) from error


def _watch(metrics: ScorerMetrics, engine: ServedEngine, hub: Hub, served: ServedModel) -> None:
    """Register gauges of single values, which the other threads replace as a whole."""

    def kv_usage() -> float:
        snapshot = engine.snapshot()
        return 1.0 - snapshot.free_pages / max(1, snapshot.total_pages)

    watch = metrics.watch
    watch("num_requests_running", "Requests in the batch.", lambda: engine.snapshot().running)
    watch("num_requests_waiting", "Requests in the queue.", lambda: engine.snapshot().waiting)
    watch("kv_cache_usage_perc", "Part of the KV cache in use, 0 to 1.", kv_usage)
    watch(
        "num_requests_undrafted",
        "Requests that want a proposer and have none: none is attached, fits or has room.",
        lambda: hub.registry.num_undrafted,
    )
    watch(
        "num_speculative_tokens",
        "K where a request names none; 0: speculation is off.",
        lambda: served.num_speculative_tokens,
    )


def build_engine(
    folder: Path, options: ScorerOptions, colocated: InProcessProposer | None = None
) -> Engine:
    """Load, check and warm up the engine and its colocated proposer, on the engine's thread.

    Raises `OutriderError`s.
    """
    began = time.perf_counter()
    transformers.utils.logging.disable_progress_bar()
    name = options.quantization
    rounded = "" if name is None else f", the weights of its linear layers rounded to {name},"
    first = "" if options.device != "cpu" else "; a first start compiles kernels, up to a minute"
    runtime.progress(
        NAME,
        f"loading {options.model} as {options.dtype}{rounded} on {options.device}: "
        "this takes seconds, or minutes for a large model that is not in the system's page cache"
        f"{first}",
    )
    build_first = () if colocated is None else (colocated.build,)
    model, runner, step_times = load(folder, options, *build_first)
    config = EngineConfig(
        page_size=options.page_size,
        num_pages=model.num_pages,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_model_len=model.max_model_len,
        num_speculative_tokens=options.num_speculative_tokens,
        synthetic_acceptance_rates=options.synthetic_acceptance_rates,
        enable_prefix_caching=options.enable_prefix_caching,
        max_prompt_logits=max(options.max_num_seqs, MAX_VALUES // model.vocab_size),
    )
    pool = model.pools.features
    ahead = 0 if options.device == "cpu" else MAX_AHEAD_BYTES
    engine = Engine(
        model,
        config,
        eos_token_ids=model.eos_token_ids,
        policy=_policy(options, step_times),
        runner=runner,
        features=None if pool is None else HiddenStateStreams(pool, max_ahead_bytes=ahead),
    )
    if colocated is not None:
        colocated.put_projection(engine)
    runtime.progress(
        NAME,
        f"loaded in {time.perf_counter() - began:.1f} s; KV cache "
        f"{model.num_pages * model.kv_bytes_per_page // 2**20} MiB = "
        f"{model.num_pages * options.page_size} tokens; warming up, a few seconds",
    )
    with start_times.phase("warm-up"):
        _warm_up(engine, config)
        # The objects that loading leaves stay, so full collections need not look at them.
        gc.collect()
        gc.freeze()
    runtime.progress(NAME, f"started in {start_times.summary()}")
    return engine


def _policy(options: ScorerOptions, step_times: Sequence[tuple[int, int, float]]) -> Policy:
    """Return the policy, which knows how long steps of (rows, tokens) take."""
    policy = POLICIES[options.speculation_policy](options.num_speculative_tokens)
    steps = policy.measured.steps
    steps.sizes = StepSizes((rows, tokens) for rows, tokens, _ in step_times)
    for rows, tokens, seconds in step_times:
        steps.observe_step(rows, tokens, seconds)
    return policy


def _warm_up(engine: Engine, config: EngineConfig) -> None:
    """Run each size of step that a single request meets, so that no client waits for the first.

    Verifying k draft tokens and processing k + 1 prompt tokens are the same forward.
    """
    longest = min(config.max_num_batched_tokens, config.max_model_len - 2)
    short = product(range(1, config.num_speculative_tokens + 2), (0.0, 1.0))
    for length, temperature in (*short, (longest, 0.0)):  # only the last token is sampled
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
