"""A scorer's hub and its proposers over streams that may stall and break: nothing sleeps."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

from prometheus_client import CollectorRegistry

from outrider.hello import make_hello
from outrider.rpc.feature_codec import SessionMessage, response_to_bytes
from outrider.rpc.telemetry import Telemetry, configure
from outrider.v1 import draft_pb2
from proposer_service.cycle import Attach, Batch, Cycle, Detach, Item
from proposer_service.metrics import ProposerMetrics
from scorer_service.config import DraftLimits
from scorer_service.drafting.attached import AttachedProposer
from scorer_service.hub import Hub
from scorer_service.metrics import ScorerMetrics
from tests.support.services.hub import SERVED, taken
from tests.support.simulators.methods import Clock, Method

Sent = draft_pb2.DraftRequest


@dataclass(frozen=True)
class Net:
    """The way between a scorer and a proposer, one way, and the proposer's Python. Seconds."""

    delay_s: float = 0.0001
    part_s: float = 0.0  # for each session of a message
    jitter_s: float = 0.0
    stall_chance: float = 0.0  # per message
    stall_s: float = 0.0
    break_chance: float = 0.0  # per message: the stream breaks
    repeat_chance: float = 0.0  # per block
    reorder_chance: float = 0.0  # per block: it comes later than those after it
    chain_s: float = 0.0
    tree_s: float = 0.0
    node_s: float = 0.0  # of a tree
    slow_chance: float = 0.0  # per message of blocks: it takes `slow_s` longer
    slow_s: float = 0.0


@dataclass
class Player:
    """A proposer with its stream and thread."""

    clock: Clock
    net: Net
    hello: draft_pb2.Hello
    cycle: Cycle
    link: int = 0  # the present stream
    attached: AttachedProposer | None = None  # by that stream; None: it is broken
    arrival: dict[str, float] = field(default_factory=lambda: {"to": 0.0, "from": 0.0})
    inbox: list[Item] = field(default_factory=list)
    outbox: list[tuple[AttachedProposer, Sent]] = field(default_factory=list)
    busy: bool = False
    spare: bool = False  # it may have something to draft ahead


class Network:
    """A scorer's hub and its proposers, over streams that may stall and break."""

    now = 0.0  # seconds

    def __init__(self, engine: Any, rng: random.Random, k: int, **served: Any) -> None:
        self.rng = rng
        self.players: list[Player] = []
        served |= {"tokenizer_hash": "", "device": "target", "num_speculative_tokens": k}
        model, metrics = replace(SERVED, **served), ScorerMetrics(CollectorRegistry(), "m")
        self.hub = Hub(engine, model, DraftLimits(), metrics, clock=lambda: self.now)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def at(self, when: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), what))

    def step(self) -> None:
        """Do what happens next."""
        assert self._events, "nothing will ever happen again"
        when, _, what = heapq.heappop(self._events)
        self.now = max(self.now, when)
        assert self.now < 3600, "livelock"
        what()

    def add(self, method: Method, net: Net, *, own_device: bool = False) -> Player:
        traits, name = method[0].traits, f"p{len(self.players)}"
        device = "draft" if own_device else "target"
        hello = make_hello(traits, "", proposer_id=name, pool="default", device=device)
        metrics = ProposerMetrics(CollectorRegistry(), "default")
        cycle = Cycle(method[0], metrics, _telemetry(), method[1])
        self.players.append(player := Player(method[1], net, hello, cycle))
        self._attach(player)
        return player

    def _takes(self, seconds: float, then: Callable[[], None]) -> None:
        """The engine's step or a proposer's work takes so long."""
        self.at(self.now + seconds, then)

    # The event loop's turns.

    def _tell(self, call: Callable[..., object], *args: object) -> None:
        """Let the hub do something, and send what proposers are to hear of it."""
        call(*args)
        for player in self.players:
            while (attached := player.attached) and (message := taken(self.hub, attached)):
                self._send(player, message)

    def _attach(self, player: Player) -> None:
        async def attach() -> AttachedProposer:  # its future nobody awaits
            return self.hub.registry.attach(player.hello)

        player.attached = attached = asyncio.run(attach())
        player.link += 1

        def send(messages: Sequence[Sent]) -> None:
            player.outbox += [(attached, message) for message in messages]
            net, blocks = player.net, [b for message in messages for b in message.blocks.blocks]
            sizes = [len(block.parents) for block in blocks]  # 0 of a chain
            slow = bool(blocks and net.slow_chance) and self.rng.random() < net.slow_chance
            player.clock.now += sum([net.tree_s if size else net.chain_s for size in sizes])
            player.clock.now += net.node_s * sum(sizes) + net.slow_s * slow

        player.inbox.append(Attach(player.link, send, 512))
        self._tell(lambda: None)

    def _break(self, player: Player) -> None:
        """Everything on its way is lost, and the proposer's sessions with it."""
        if (attached := player.attached) is None:
            return
        player.attached = None
        player.arrival = {"to": 0.0, "from": 0.0}
        player.inbox.append(Detach(player.link))
        self.at(self.now + 0.01, partial(self._attach, player))
        self._tell(self.hub.registry.detach, attached)

    # The way between them.

    def _send(self, player: Player, message: SessionMessage) -> None:
        """Send what waited for a proposer, as of all that a step committed."""
        batch, link = draft_pb2.DraftResponse.FromString(response_to_bytes(message)).sessions, 0

        def arrive() -> None:
            player.inbox.append(Batch(link, batch, self.now))
            self._cycle(player)

        link, num_parts = player.link, len(batch.opens) + len(batch.commits) + len(batch.closes)
        self._travel(player, "to", num_parts, arrive)

    def _post(self, player: Player, attached: AttachedProposer, message: Sent) -> None:
        """One message of a cycle's; its blocks may come again, or again and later."""
        net, rng, blocks = player.net, self.rng, message.blocks.blocks
        if message.HasField("lost"):
            lost = partial(self._tell, self.hub.registry.on_lost, attached, message.lost)
            self._travel(player, "from", 1, lost)
            return
        arrive = partial(self._tell, self.hub.blocks.receive, attached)
        self._travel(player, "from", len(blocks), partial(arrive, blocks))
        for block in blocks:
            if rng.random() < net.repeat_chance:
                self._travel(player, "from", 1, partial(arrive, [block]))
            if rng.random() < net.reorder_chance:
                self.at(self.now + net.delay_s + rng.random() * 0.02, partial(arrive, [block]))

    def _travel(self, player: Player, way: str, num_parts: int, arrive: Callable[[], None]) -> None:
        net, rng = player.net, self.rng
        if rng.random() < net.break_chance:
            self._break(player)
            return
        delay = net.delay_s + net.part_s * num_parts + rng.random() * net.jitter_s
        if rng.random() < net.stall_chance:
            delay += rng.random() * net.stall_s
        player.arrival[way] = max(player.arrival[way], self.now + delay)
        self.at(player.arrival[way], arrive)

    def _cycle(self, player: Player) -> None:
        """The thread takes what has come, and drafts. Blocks leave when that would be done."""
        if player.busy:
            return
        items, player.inbox = player.inbox, []
        player.clock.now, cycle = self.now, player.cycle
        if items or cycle.has_work:
            cycle.apply(items)
            cycle.draft()
            player.spare = True
        elif player.spare:
            player.spare = cycle.ahead()
        else:
            return
        messages, player.outbox = player.outbox, []

        def done() -> None:
            player.busy = False
            for attached, message in messages:
                self._post(player, attached, message)
            self._cycle(player)

        player.busy = True
        self._takes(player.clock.now - self.now + 1e-5, done)


@cache
def _telemetry() -> Telemetry:
    return configure("outrider-proposer")
