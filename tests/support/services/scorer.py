"""A whole scorer in this process: real RPC, real engine thread, a model without weights."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from outrider.config import EngineConfig
from outrider.draft_port import EarlyTokens
from outrider.drafting.proposer import Proposer
from outrider.engine.batch import PackedBatch
from outrider.engine.engine import Engine
from outrider.engine.engine_thread import EngineThread
from outrider.engine.hidden_states.streams import HiddenStateStreams
from outrider.engine.sampling.constraint import ConstraintCompiler
from outrider.features import FeatureSpec
from outrider.policy.base import FixedPolicy
from outrider.rpc.channel import open_channel
from outrider.rpc.data_connection import DataPort
from outrider.rpc.deployment import TlsFiles
from outrider.rpc.server import GrpcServer
from outrider.rpc.telemetry import Telemetry, configure
from outrider.types import StepEvents
from outrider.v1 import common_pb2, scorer_pb2, scorer_pb2_grpc
from scorer_service.call import SERVICE_NAME, Serving
from scorer_service.config import DraftLimits, ServedModel
from scorer_service.constraints import Constraints
from scorer_service.drafting.in_process import InProcessProposer
from scorer_service.drafting.in_process_link import attach
from scorer_service.drafting.side import LocalDrafts
from scorer_service.hub import Hub
from scorer_service.metrics import ScorerMetrics
from scorer_service.servicer import ScorerServicer, add_to_server
from tests.support.models.features import FeatureHash
from tests.support.models.hash_model import HashModel

VOCAB, MAX_LEN = 32, 160
TOKENIZER_HASH = "ab" * 32


class PacedModel(HashModel):
    """Takes `pause_s` per forward, so that something can happen in the middle of a request."""

    def __init__(self, pause_s: float = 0.0, vocab_size: int = VOCAB) -> None:
        super().__init__(vocab_size, page_size=4, num_pages=512, max_model_len=MAX_LEN)
        self.pause_s = pause_s

    def forward(self, batch: PackedBatch) -> Tensor:
        if self.pause_s:
            time.sleep(self.pause_s)
        return super().forward(batch)


class PacedFeatures(FeatureHash, PacedModel):
    """With hidden states."""


@dataclass
class Output:
    """What a client got."""

    token_ids: list[int] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)
    messages: int = 0
    last: scorer_pb2.ScorerServiceGenerateResponse | None = None

    @property
    def aux_info(self) -> common_pb2.AuxInfo:
        assert self.last is not None
        return self.last.aux_info


@dataclass
class RunningScorer:
    """Handles of a scorer under test."""

    address: str
    data_address: str
    """Of its data connections; empty without."""
    stub: scorer_pb2_grpc.ScorerServiceAsyncStub
    model: PacedModel
    servicer: ScorerServicer
    hub: Hub
    thread: EngineThread
    telemetry: Telemetry

    async def generate(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int = 40,
        temperature: float = 0.0,
        seed: int = 7,
        enabled: bool = True,
        method: str | None = None,
        timeout_s: float = 30.0,
        metadata: tuple[tuple[str, str], ...] = (),
    ) -> Output:
        request = generate_request(
            prompt,
            max_tokens=max_tokens,
            temperature=temperature,
            seed=seed,
            enabled=enabled,
            method=method,
        )
        output = Output()
        async for response in self.stub.Generate(request, timeout=timeout_s, metadata=metadata):
            output.token_ids += response.token_ids
            output.kinds += response.kinds
            output.messages += 1
            output.last = response
        return output

    async def info(self) -> scorer_pb2.GetScorerInfoResponse:
        return await self.stub.GetScorerInfo(scorer_pb2.GetScorerInfoRequest(), timeout=10)

    async def until(self, condition: Callable[[], bool], what: str, timeout_s: float = 10) -> None:
        """Polls: for states that no event announces."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"never happened: {what}"
            await asyncio.sleep(0.002)

    def metric(self, name: str, **labels: str) -> float:
        value = self.telemetry.registry.get_sample_value(
            f"outrider:{name}", {"model_name": "default", **labels}
        )
        return value or 0.0


def generate_request(
    prompt: Sequence[int],
    *,
    max_tokens: int = 40,
    temperature: float = 0.0,
    seed: int = 7,
    enabled: bool = True,
    method: str | None = None,
) -> scorer_pb2.ScorerServiceGenerateRequest:
    return scorer_pb2.ScorerServiceGenerateRequest(
        request_id="test",
        prompt_token_ids=prompt,
        sampling=common_pb2.SamplingParams(temperature=temperature, seed=seed),
        stop=common_pb2.StopParams(max_tokens=max_tokens),
        speculation=common_pb2.SpeculationParams(enabled=enabled, method=method),
    )


@dataclass(frozen=True, slots=True)
class ScorerSetup:
    """A scorer under test, as it differs from the default."""

    pause_s: float = 0.0
    limits: DraftLimits = field(default_factory=DraftLimits)
    telemetry: Telemetry | None = None
    num_speculative_tokens: int = 4
    vocab_size: int = VOCAB
    compiler: ConstraintCompiler | None = None
    features: FeatureSpec | None = None
    policy: type[FixedPolicy] = FixedPolicy
    unix_path: Path | None = None
    data_connections: bool = True
    tls: TlsFiles | None = None
    in_process: Callable[[PacedModel], Proposer] | None = None
    """Makes a method that the scorer drafts by itself."""
    drafts_before_prompts: bool = False


@asynccontextmanager
async def running_scorer(**changes: Any) -> AsyncIterator[RunningScorer]:
    """Run a scorer; afterwards every page is free and the engine's books agree."""
    setup = ScorerSetup(**changes)
    loop = asyncio.get_running_loop()
    telemetry = setup.telemetry or configure("scorer-under-test")
    model = (
        PacedModel(setup.pause_s, setup.vocab_size)
        if setup.features is None
        else PacedFeatures(setup.pause_s)
    )
    streams = None
    if isinstance(model, PacedFeatures) and setup.features is not None:
        streams = HiddenStateStreams(model.capture(setup.features))
    engines: list[Engine] = []
    hubs: list[Hub] = []
    colocated: InProcessProposer | None = None
    if setup.in_process is not None:
        method = setup.in_process(model)
        colocated = InProcessProposer(
            lambda: (method, TOKENIZER_HASH),
            "in-process-0",
            drafts_before_prompts=setup.drafts_before_prompts,
        )

    def build() -> Engine:
        config = EngineConfig(
            page_size=model.page_size,
            num_pages=model.num_pages,
            max_model_len=MAX_LEN,
            max_num_batched_tokens=64,
            num_speculative_tokens=setup.num_speculative_tokens,
        )
        # A fixed patience: the adaptive policy would not wait for a proposer on a busy machine.
        patient = setup.policy(config.num_speculative_tokens, max_wait_s=0.05)
        engines.append(Engine(model, config, policy=patient, features=streams))
        if colocated is not None:
            colocated.build()
            colocated.put_projection(engines[0])
        return engines[0]

    def on_events(events: StepEvents) -> None:
        loop.call_soon_threadsafe(hubs[0].on_events, events)

    def on_early(early: EarlyTokens) -> None:
        loop.call_soon_threadsafe(hubs[0].on_early, early)

    thread = EngineThread(build, on_events, colocated, on_early)
    info = thread.start(10)
    served = ServedModel(
        scorer_id="scorer-0",
        model="hash",
        served_model_name="default",
        tokenizer_hash=TOKENIZER_HASH,
        vocab_size=info.vocab_size,
        max_model_len=info.max_model_len,
        dtype="float32",
        eos_token_ids=info.eos_token_ids,
        num_speculative_tokens=setup.num_speculative_tokens,
        features=info.features,
    )
    hub = Hub(thread, served, setup.limits, ScorerMetrics(telemetry.registry, "default"))
    hubs.append(hub)
    if colocated is not None:
        attach(hub.registry, thread, colocated, served)
    servicer = ScorerServicer(telemetry)
    constraints = Constraints(setup.compiler)
    unix, tls = None if setup.unix_path is None else str(setup.unix_path), setup.tls
    data_port = None
    if setup.data_connections:
        data_port = DataPort("127.0.0.1", 0, unix_path=unix, tls=tls)
    data_address = "" if data_port is None else f"127.0.0.1:{await data_port.start()}"
    drafts = LocalDrafts(hub.blocks, data_port)
    servicer.begin(Serving(thread, hub, served, info, constraints, drafts))
    server = GrpcServer(
        "127.0.0.1:0",
        lambda grpc_server: add_to_server(servicer, grpc_server),
        [SERVICE_NAME],
        unix_path=unix,
        tls=tls,
    )
    address = f"127.0.0.1:{await server.start()}"
    await server.set_serving(True)
    try:
        async with open_channel(address, tls) as channel:
            scorer = RunningScorer(
                address,
                data_address,
                scorer_pb2_grpc.ScorerServiceStub(channel),
                model,
                servicer,
                hub,
                thread,
                telemetry,
            )
            yield scorer
            assert await hub.wait_idle(10), "a session outlived its request"
            await scorer.until(
                lambda: thread.snapshot().running + thread.snapshot().waiting == 0, "engine idle"
            )
    finally:
        await server.stop(0)
        if data_port is not None:
            await data_port.stop()
        await asyncio.to_thread(thread.stop, 10)
        constraints.close()
        telemetry.shutdown()
    engines[0].check_invariants()
    snapshot = engines[0].snapshot()
    assert snapshot.free_pages == snapshot.total_pages
