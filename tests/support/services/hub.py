"""A hub, played by hand: what it tells the engine is written down."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from dataclasses import replace

from prometheus_client import CollectorRegistry

from outrider.draft_port import DraftOffer, PostedBlock
from outrider.draft_tree import DraftTree
from outrider.features import FeatureBatch, FeatureOrder, FeatureRows, FeatureSpec, FeatureWindow
from outrider.params import SamplingParams, SpeculationParams
from outrider.rpc.feature_codec import SessionMessage, response_to_bytes
from outrider.types import (
    Commit,
    Failure,
    FinishReason,
    Request,
    StepEvents,
    StepTimings,
    TokenKind,
)
from outrider.v1 import draft_pb2
from scorer_service.config import DraftLimits, ServedModel
from scorer_service.drafting.attached import AttachedProposer
from scorer_service.drafting.outbox import Outbox
from scorer_service.hub import Hub
from scorer_service.metrics import ScorerMetrics
from scorer_service.sessions import Session
from tests.support.services.scorer import TOKENIZER_HASH, VOCAB
from tests.support.services.scripted_proposer import hello

SERVED = ServedModel("s", "hash", "default", TOKENIZER_HASH, VOCAB, 1000, "float32", frozenset(), 4)
FINAL = FeatureSpec(2, final_norm=True)
TIMINGS = StepTimings(0.1, 1.0, 0.1, 0.1, 0.0, 1, 1)


class RecordingFeatures:
    """The part of `HiddenStateCommands` that the hub uses."""

    def __init__(self) -> None:
        self.given_back: list[tuple[FeatureWindow, int]] = []

    def give_back(self, window: FeatureWindow, size: int) -> None:
        self.given_back.append((window, size))


class RecordingEngineThread:
    """The part of `EngineThread` that the hub uses; writes down what it is told."""

    def __init__(self) -> None:
        self.running = self.drafting = True
        self.set: dict[int, tuple[str | None, int]] = {}
        self.asked: dict[int, bool] = {}
        self.own_device: dict[int, bool] = {}
        self.blocks: list[tuple[int, DraftTree, str]] = []
        self.methods: list[str] = []
        self.orders: dict[int, FeatureOrder | None] = {}
        self.features = RecordingFeatures()
        self.aborted: list[int] = []
        self.refuse: Exception | None = None

    def submit(self, _request: Request, _constraint: None) -> None:
        if self.refuse is not None:
            raise self.refuse

    def abort(self, session_id: int) -> None:
        self.aborted.append(session_id)

    def between_same_steps(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def set_drafting(self, session_id: int, offer: DraftOffer) -> None:
        assert not offer.colocated, "nobody here drafts on the engine's thread"
        self.set[session_id] = (offer.proposer_id, offer.max_draft_tokens)
        self.asked[session_id] = offer.requested
        self.own_device[session_id] = offer.own_device
        self.orders[session_id] = offer.features

    def post_blocks(self, blocks: Iterable[PostedBlock]) -> None:
        for block in blocks:
            self.blocks.append((block.session_id, block.tree, block.proposer_id))
            self.methods.append(block.method)


class Bench:
    """A hub and what records in place of an engine."""

    def __init__(
        self,
        limits: DraftLimits | None = None,
        device: str = "GPU-1",
        clock: Callable[[], float] | None = None,
        k: int = SERVED.num_speculative_tokens,
    ) -> None:
        self.thread = RecordingEngineThread()
        self.metrics = metrics = ScorerMetrics(CollectorRegistry(), "default")
        served = replace(SERVED, features=FINAL, device=device, num_speculative_tokens=k)
        self.hub = Hub(self.thread, served, limits or DraftLimits(), metrics, clock=clock)  # type: ignore[arg-type]

    def attach(self, proposer_id: str, **fields: object) -> AttachedProposer:
        return self.hub.registry.attach(hello(proposer_id=proposer_id, **fields))

    def submit(
        self,
        prompt: tuple[int, ...] = (1, 2, 3),
        speculation: SpeculationParams | None = None,
    ) -> Session:
        request = Request(
            self.hub.next_session_id(),
            prompt,
            SamplingParams(temperature=0),
            speculation=speculation or SpeculationParams(),
        )
        return self.hub.submit(request, "")

    async def sent(self, proposer: AttachedProposer) -> SessionMessage:
        """What is being sent to the proposer now."""
        async with asyncio.timeout(30):
            message = await proposer.outbox.take()
        self.hub.registry.on_taken(proposer.outbox)
        return message

    def step(
        self,
        *commits: Commit,
        set_aside: tuple[int, ...] = (),
        features: tuple[FeatureRows, ...] = (),
        failures: tuple[Failure, ...] = (),
    ) -> None:
        batch = FeatureBatch(features, 0.001) if features else None
        self.hub.on_events(StepEvents(commits, failures, TIMINGS, set_aside, features=batch))


def commit(
    session: Session, *tokens: int, finish: FinishReason | None = None, k: int = 3
) -> Commit:
    """Return a round whose tokens but the last were drafted."""
    kinds = (*[TokenKind.ACCEPTED] * (len(tokens) - 1), TokenKind.PLAIN)
    return Commit(session.id, len(session.committed), tokens, kinds, k, finish)


def taken(hub: Hub, proposer: AttachedProposer) -> SessionMessage | None:
    """Take what waits to be sent to a proposer, without an event loop."""
    assert isinstance(proposer.outbox, Outbox)
    if not proposer.outbox._wake.is_set():
        return None
    try:
        proposer.outbox.take().send(None)
    except StopIteration as message:
        hub.registry.on_taken(proposer.outbox)
        taken: SessionMessage = message.value
        return taken
    raise AssertionError("it does not wait")


async def sent(proposer: AttachedProposer) -> draft_pb2.SessionBatch:
    async with asyncio.timeout(30):
        message = await proposer.outbox.take()
    return draft_pb2.DraftResponse.FromString(response_to_bytes(message)).sessions
