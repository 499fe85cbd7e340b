"""A scorer's engine, its hub and its proposers on a simulated clock: real code, made-up times.

What stands between them (streams, the threads of engine and proposers) is played here: messages
travel with delays, streams stall and break, blocks are repeated and reordered. Nothing sleeps.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

from prometheus_client import CollectorRegistry

from outrider.config import EngineConfig
from outrider.draft_port import DraftOffer, PostedBlock
from outrider.engine.engine import Engine
from outrider.engine.step import Step
from outrider.features import FeatureWindow
from outrider.hello import make_hello
from outrider.policy.base import Policy
from outrider.rpc.feature_codec import SessionMessage, response_to_bytes
from outrider.rpc.telemetry import configure
from outrider.types import Commit, Request, StepEvents
from outrider.v1 import draft_pb2
from proposer_service.cycle import Attach, Batch, Cycle, Detach, Item
from proposer_service.metrics import ProposerMetrics
from scorer_service.config import DraftLimits
from scorer_service.drafting.attached import AttachedProposer
from scorer_service.hub import Hub
from scorer_service.metrics import ScorerMetrics
from tests.support.models.hash_model import HashModel
from tests.support.services.hub import SERVED, taken
from tests.support.simulators.methods import VOCAB, Clock, Method, Net

Sent = draft_pb2.DraftRequest
_telemetry = cache(configure)


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


class World:
    """Runs requests to their end: see `committed` and `last`; or `set_rows` without end."""

    now = 0.0  # seconds
    answer_len = 0  # tokens of each request that follows another

    def __init__(
        self,
        policy: Policy,
        config: EngineConfig,
        step_s: Callable[[Step], float],
        rng: random.Random,
        model: HashModel | None = None,
        **parts: Any,
    ) -> None:
        """`parts` are those of the engine that it does not make itself."""
        max_len, k = config.max_model_len, config.num_speculative_tokens
        self.model = model = model or HashModel(VOCAB, config.page_size, config.num_pages, max_len)
        self.policy, self.step_s, self.rng = policy, step_s, rng
        self.features = self  # the hub gives windows back
        self.engine = Engine(model, config, policy=policy, clock=lambda: self.now, **parts)
        traits = {"vocab_size": model.vocab_size, "features": self.engine.info.features}
        traits |= {"device": "target", "max_model_len": max_len, "num_speculative_tokens": k}
        served = replace(SERVED, tokenizer_hash="", **traits)
        metrics = ScorerMetrics(CollectorRegistry(), "m")
        self.hub = Hub(self, served, DraftLimits(), metrics, clock=lambda: self.now)
        self.players: list[Player] = []
        self._events, self._order = list[tuple[float, int, Callable[[], None]]](), itertools.count()
        self._commands: list[Callable[[], object]] = []  # to the engine
        self.requests, self.last = dict[int, Request](), dict[int, Commit]()
        self.committed: dict[int, list[int]] = {}
        self.num_rows, self._most_rows = 0, config.max_num_seqs
        self.num_tokens = 0  # since `rate` began

    def begin(self, request: Request) -> None:
        self.requests[request.session_id] = request
        self.committed[request.session_id] = list(request.prompt_token_ids)
        self._tell(self.hub.submit, request, "")
        self.at(self.now, self._work)

    def run(self, until: float = float("inf")) -> None:
        """Until every request has ended, or it is so late."""
        self.at(until, lambda: None)
        while len(self.last) < len(self.requests) and self.now < until:
            self.step()
            self.set_rows(self.num_rows)

    def set_rows(self, rows: int, *, apart: bool = False) -> None:
        """Keep `rows` requests in flight. `apart`: the first answers end one after the other."""
        self.num_rows = rows
        for i in range(len(self.requests) - len(self.last), rows):
            self.begin(self._request(self.answer_len * (i + 1 if apart else rows) // rows))

    def rate(self, seconds: float, *, after: float = 0.0) -> float:
        """Tokens per second of so many, which begin after others."""
        self.run(self.now + after)
        self.num_tokens = 0
        self.run(self.now + seconds)
        return self.num_tokens / seconds

    _request: Callable[[int], Request]  # makes the one that follows those so far, of so many tokens

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
        device, name = "draft" if own_device else "target", f"p{len(self.players)}"
        hello = make_hello(method[0].traits, "", proposer_id=name, pool="default", device=device)
        metrics = ProposerMetrics(CollectorRegistry(), "default")
        cycle = Cycle(method[0], metrics, _telemetry("outrider-proposer"), method[1])
        self.players.append(player := Player(method[1], net, hello, cycle))
        self._attach(player)
        return player

    def _takes(self, seconds: float, then: Callable[[], None]) -> None:
        """The engine's step or a proposer's work takes so long."""
        self.at(self.now + seconds, then)

    def _tell(self, call: Callable[..., object], *args: object) -> None:
        """Let the hub do something, and send what proposers are to hear of it."""
        call(*args)
        for player in self.players:
            while (attached := player.attached) and (message := taken(self.hub, attached)):
                self._send(player, message)

    # What the hub sees of the engine.

    running, between_same_steps = True, contextlib.nullcontext

    def submit(self, request: Request, _constraint: object) -> None:
        self.engine.submit(request)

    @property
    def drafting(self) -> bool:
        rows = min(len(self.requests) - len(self.last), self._most_rows)
        return rows.bit_length() not in self.engine.snapshot().undrafted_sizes

    def set_drafting(self, session: int, offer: DraftOffer) -> None:
        self._command(partial(self.engine.set_drafting, session, offer))

    def post_blocks(self, blocks: Iterable[PostedBlock]) -> None:
        for block in blocks:
            self._command(partial(self.engine.post_block, block._replace(arrived_at=self.now)))

    def give_back(self, window: FeatureWindow, size: int) -> None:
        self._command(partial(self.engine.features.give_back, window, size))

    # The engine's thread.

    def _command(self, command: Callable[[], object]) -> None:
        """Between two steps, as the engine's thread does it."""
        self._commands.append(command)
        self.at(self.now, self._work)

    def _work(self, *, step_ended: bool = False) -> None:
        if self.engine._in_flight and not step_ended:
            return
        self.engine.collect()
        self.engine.check_invariants()
        self._carry_out()
        self.engine.launch()
        if flight := self.engine._in_flight:
            self._last_step_s = self.step_s(flight.step)
            self._takes(self._last_step_s, partial(self._work, step_ended=True))
        self._finalize(self.engine.wake_at)
        if not flight:
            self.engine.check_invariants()

    def _carry_out(self) -> None:
        while self._commands:
            self._commands.pop(0)()

    def _finalize(self, wake_at: float) -> None:
        events = self.engine.finalize_step()
        if not self.engine._in_flight and wake_at < float("inf"):
            self.at(max(self.now, wake_at), self._work)
        if events is not None:
            self._publish(events)

    def _publish(self, events: StepEvents) -> None:
        assert not events.failures
        for commit in events.commits:
            session = commit.session_id
            assert commit.base_len == len(self.committed[session])
            self.committed[session] += commit.token_ids
            self.num_tokens += len(commit.token_ids)
            if commit.finish_reason is not None:
                self.last[session] = commit
        if (timings := events.timings) is not None:
            timings = replace(timings, forward_ms=1e3 * self._last_step_s, verify_ms=0.0)
        self._tell(self.hub.on_events, replace(events, timings=timings, counts=None))

    # The proposers, and the way to them.

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
        if attached := player.attached:
            player.attached, player.arrival = None, {"to": 0.0, "from": 0.0}
            player.inbox.append(Detach(player.link))
            self.at(self.now + 0.01, partial(self._attach, player))
            self._tell(self.hub.registry.detach, attached)

    def _send(self, player: Player, message: SessionMessage) -> None:
        """Send what waited for a proposer, as of all that a step committed."""
        batch = draft_pb2.DraftResponse.FromString(response_to_bytes(message)).sessions
        link, num_parts = player.link, len(batch.opens) + len(batch.commits) + len(batch.closes)

        def arrive() -> None:
            player.inbox.append(Batch(link, batch, self.now))
            self._cycle(player)

        self._travel(player, "to", num_parts, arrive)

    def _post(self, player: Player, attached: AttachedProposer, message: Sent) -> None:
        """One message of a cycle's; its blocks may come again, or again and later."""
        net, rng, blocks = player.net, self.rng, message.blocks.blocks
        arrive = partial(self._tell, self.hub.blocks.receive, attached, blocks)
        if message.HasField("lost"):
            arrive = partial(self._tell, self.hub.registry.on_lost, attached, message.lost)
        self._travel(player, "from", len(blocks) or 1, arrive)
        for block in blocks:
            again = partial(self._tell, self.hub.blocks.receive, attached, [block])
            if rng.random() < net.repeat_chance:
                self._travel(player, "from", 1, again)
            if rng.random() < net.reorder_chance:
                self.at(self.now + net.delay_s + rng.random() * 0.02, again)

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
