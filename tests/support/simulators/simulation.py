"""A scorer's engine and its proposers on a simulated clock: real code, made-up times.

The engine, the policy and the drafting methods are the real ones; what stands between them (hub,
streams, the proposer's thread) is played here: commits and blocks travel with delays, streams stall
and break, blocks are repeated and reordered. Nothing sleeps.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from outrider.config import EngineConfig
from outrider.draft_port import NO_DRAFTS, DraftOffer, PostedBlock
from outrider.draft_tree import DraftTree
from outrider.drafting.copying.deterministic import DeterministicProposer
from outrider.drafting.copying.ngram import NgramProposer
from outrider.drafting.copying.suffix import SuffixProposer
from outrider.drafting.draft_model.loops import EagerForks
from outrider.drafting.draft_model.proposer import DraftModelProposer
from outrider.drafting.hybrid import HybridProposer
from outrider.drafting.proposer import DraftRound, Proposer, ProposerLimits, SessionStart
from outrider.engine.batch import PackedBatch
from outrider.engine.engine import Engine
from outrider.engine.hidden_states.streams import HiddenStateStreams
from outrider.engine.runner import StepRunner
from outrider.features import FeatureOrder, FeatureRows, FeatureWindow
from outrider.policy.base import Policy
from outrider.types import Commit, Request, StepEvents
from proposer_service.pace import PaceMeter
from tests.support.models.hash_model import HashModel

VOCAB, MAX_LEN = 32, 4096


@dataclass(frozen=True)
class Net:
    """The way between a scorer and a proposer. Seconds, one way."""

    delay_s: float = 0.0001
    jitter_s: float = 0.0
    stall_chance: float = 0.0  # per message
    stall_s: float = 0.0
    break_chance: float = 0.0  # per message: the stream breaks
    redial_s: float = 0.01
    repeat_chance: float = 0.0  # per block
    reorder_chance: float = 0.0  # per block: it comes later than those after it


@dataclass
class Clock:
    """What a drafting thread takes."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


class DraftHash(HashModel):
    """Agrees with the target of the same vocabulary the more, the smaller `eps` is."""

    def __init__(self, clock: Clock, eps: float, forward_s: float, row_s: float, **sizes: int):
        super().__init__(VOCAB, **sizes)
        self._clock, self._eps, self._times = clock, eps, (forward_s, row_s)

    def forward(self, batch: PackedBatch) -> Tensor:
        self._clock.now += self._times[0] + self._times[1] * len(batch.query_lens)
        return super().forward(batch)

    def _logits(self, states):  # type: ignore[no-untyped-def]
        other = super()._logits(states ^ 0x5BD1E995)
        return (1 - self._eps) * super()._logits(states) + self._eps * other


@dataclass
class Player:
    """A proposer with its stream and thread."""

    id: str
    method: Proposer
    clock: Clock
    net: Net
    rng: random.Random
    meter: PaceMeter = field(default_factory=PaceMeter)
    connected: bool = True
    incarnation: int = 0
    busy_until: float = 0.0
    inbox: list[Callable[[], None]] = field(default_factory=list)
    wanting: dict[int, None] = field(default_factory=dict)
    drafted: dict[int, None] = field(default_factory=dict)
    sessions: dict[int, int] = field(default_factory=dict)  # key -> session
    keys: dict[int, int] = field(default_factory=dict)  # session -> key, as the scorer knows it
    arrival: dict[str, float] = field(default_factory=lambda: {"to": 0.0, "from": 0.0})
    window: FeatureWindow = field(default_factory=FeatureWindow)
    starved: set[int] = field(default_factory=set)  # keys that want a draft and lack features
    on_demand: bool = False  # it is not to run ahead
    own_device: bool = False  # not the engine's


_Block = tuple[Player, int, int, DraftTree, int]  # from which incarnation, key, tree, us


def draft_model(
    eps: float = 0.2,
    forward_s: float = 0.0006,
    row_s: float = 0.0,
    *,
    max_branches: int = 8,
    num_pages: int = 4096,
    max_model_len: int = MAX_LEN,
) -> tuple[Proposer, Clock]:
    clock = Clock()
    model = DraftHash(
        clock, eps, forward_s, row_s, page_size=4, num_pages=num_pages, max_model_len=max_model_len
    )
    method = DraftModelProposer(
        model,
        name="hash",
        limits=ProposerLimits(max_branches=max_branches),
        fork_drafter=EagerForks(model),
        clock=clock,
    )
    return method, clock


def ngram(max_branches: int = 8) -> tuple[Proposer, Clock]:
    return NgramProposer(prompt_lookup_min=1, max_branches=max_branches), Clock()


def suffix(max_branches: int = 8) -> tuple[Proposer, Clock]:
    return SuffixProposer(max_branches=max_branches), Clock()


def deterministic(max_branches: int = 8) -> tuple[Proposer, Clock]:
    return DeterministicProposer(max_branches=max_branches), Clock()


def hybrid(*methods: tuple[Proposer, Clock]) -> tuple[Proposer, Clock]:
    """Several methods in one proposer, which takes the time of the last."""
    return HybridProposer([method for method, _ in methods]), methods[-1][1]


class World:
    """Runs requests to their end; `texts` and `stats` hold what came of them."""

    def __init__(
        self,
        policy: Policy,
        config: EngineConfig,
        step_s: Callable[[int], float],
        rng: random.Random,
        model: HashModel | None = None,
        features: HiddenStateStreams | None = None,
        runner: StepRunner | None = None,
    ) -> None:
        self.now = 0.0
        self.rng = rng
        self.model = model or HashModel(
            VOCAB, config.page_size, config.num_pages, config.max_model_len
        )
        self.engine = Engine(
            self.model,
            config,
            policy=policy,
            runner=runner,
            features=features,
            clock=lambda: self.now,
        )
        self.step_s = step_s
        self.players: list[Player] = []
        self.requests: dict[int, Request] = {}
        self.committed: dict[int, list[int]] = {}
        self.last: dict[int, Commit] = {}
        self.rows_per_step: list[int] = []
        self.next_request: Callable[[], Request] | None = None  # whenever one has ended
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._blocks: list[tuple[_Block, float]] = []  # and when each came
        self._commands: list[Callable[[], None]] = []
        self._in_flight = False
        self._keys = itertools.count(1)

    def at(self, when: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), what))

    def add(self, method: tuple[Proposer, Clock], net: Net, *, own_device: bool = False) -> Player:
        player = Player(f"p{len(self.players)}", *method, net, self.rng, own_device=own_device)
        self.players.append(player)
        return player

    def submit(self, request: Request) -> None:
        self.engine.submit(request)
        self.requests[request.session_id] = request
        self.committed[request.session_id] = list(request.prompt_token_ids)
        if self.players:
            self._open(self.players[request.session_id % len(self.players)], request.session_id)
        self.at(self.now, self._work)

    def run(self, until: float = float("inf")) -> None:
        """Until every request has ended, or it is so late."""
        while len(self.last) < len(self.requests) and self.now < until:
            self.step()

    def step(self) -> None:
        """What happens next."""
        assert self._events, "nothing will ever happen again"
        when, _, what = heapq.heappop(self._events)
        self.now = max(self.now, when)
        assert self.now < 3600, "livelock"
        what()
        if not self._in_flight:
            self.engine.check_invariants()

    # The scorer.

    def _command(self, command: Callable[[], None]) -> None:
        """Between two steps, as the engine's thread does it."""
        self._commands.append(command)
        self.at(self.now, self._work)

    def _work(self) -> None:
        if self._in_flight:
            return
        self.engine.collect()
        self.engine.check_invariants()
        for command in self._commands:
            command()
        self._commands.clear()
        for (player, incarnation, key, tree, draft_us), came_at in self._blocks:
            session = player.sessions.get(key)
            current = incarnation == player.incarnation and session is not None
            if current and player.keys.get(session) == key:
                self.engine.post_block(PostedBlock(session, tree, player.id, draft_us, came_at))
        self._blocks.clear()
        if self.engine.launch():
            flight = self.engine._in_flight
            assert flight is not None
            self._in_flight = True
            self.rows_per_step.append(len(flight.step.rows))
            self.at(self.now + self.step_s(flight.step.num_tokens), self._collect)
        events = self.engine.finalize_step()
        if not self._in_flight and self.engine.wake_at < float("inf"):
            self.at(max(self.now, self.engine.wake_at), self._work)
        if events is not None:
            assert not events.failures
            self._publish_features(events)
            if events.timings is not None:
                self._publish(events)

    def _collect(self) -> None:
        self._in_flight = False
        self._work()

    def _publish(self, events: StepEvents) -> None:
        assert events.timings is not None
        step_s = self.step_s(events.timings.num_tokens)
        messages: dict[str, list[Callable[[Player], None]]] = {p.id: [] for p in self.players}
        for commit in events.commits:
            session = commit.session_id
            assert commit.base_len == len(self.committed[session])
            self.committed[session] += commit.token_ids
            player = next((p for p in self.players if session in p.keys), None)
            if commit.finish_reason is not None:
                self.last[session] = commit
                if self.next_request is not None:
                    self.at(self.now, lambda: self.submit(self.next_request()))
                if player is not None:
                    key = player.keys.pop(session)
                    messages[player.id].append(lambda p, k=key: self._closed(p, k))
            elif player is not None:
                key = player.keys[session]
                messages[player.id].append(lambda p, k=key, c=commit: self._told(p, k, c, step_s))
        for player in self.players:
            if parts := messages[player.id]:
                self._send(player, lambda p: _told_how(p, events), *parts)

    def _publish_features(self, events: StepEvents) -> None:
        for rows in () if events.features is None else events.features.rows:
            for player in self.players:
                if player.window is rows.order.window:
                    self._send(player, lambda p, r=rows: self._told_features(p, r))

    def _open(self, player: Player, session: int) -> None:
        if not player.connected or session in self.last:
            return
        key = next(self._keys)
        player.keys[session], player.sessions[key] = key, session
        request, prefix = self.requests[session], list(self.committed[session])
        k = player.method.traits.max_draft_tokens
        k = min(k, self.engine.info.num_speculative_tokens)
        ahead = player.method.traits.runs_ahead
        spec = player.method.traits.features
        order = None if spec is None else FeatureOrder(key, spec, player.window)
        self._command(
            lambda: self.engine.set_drafting(
                session,
                DraftOffer(
                    player.id,
                    k,
                    runs_ahead=ahead,
                    own_device=player.own_device,
                    requested=asked,
                    features=order,
                ),
            )
        )
        prompt_len = len(request.prompt_token_ids)
        start = SessionStart(
            prefix,
            request.sampling,
            k,
            max_len=prompt_len + request.stop.max_tokens,
            advice=request.speculation.advice,
            num_output_tokens=len(prefix) - prompt_len,
        )

        asked = len(self.engine._scheduler.by_session).bit_length() not in (
            self.engine.snapshot().undrafted_sizes
        )

        def opened(p: Player) -> None:
            p.method.open(key, start)
            if asked:
                p.wanting[key] = None

        self._send(player, opened)

    # The way between them.

    def _send(self, player: Player, *parts: Callable[[Player], None]) -> None:
        """One message, as of all that a step committed."""
        incarnation = player.incarnation

        def arrive() -> None:
            if player.incarnation == incarnation:
                player.inbox += [lambda part=part: part(player) for part in parts]
                self._cycle(player)

        self._travel(player, "to", arrive)

    def _travel(self, player: Player, way: str, arrive: Callable[[], None]) -> None:
        net, rng = player.net, self.rng
        if rng.random() < net.break_chance:
            self._break(player)
            return
        delay = net.delay_s + rng.random() * net.jitter_s
        if rng.random() < net.stall_chance:
            delay += rng.random() * net.stall_s
        player.arrival[way] = max(player.arrival[way], self.now + delay)
        self.at(player.arrival[way], arrive)

    def _break(self, player: Player) -> None:
        """Everything on its way is lost, and the proposer's sessions with it."""
        player.incarnation += 1
        player.connected = False
        for key in list(player.sessions):
            player.method.close(key)
        sessions = [s for s in player.keys if s not in self.last]
        for state in (player.sessions, player.keys, player.wanting, player.drafted):
            state.clear()
        player.inbox.clear()
        player.starved.clear()
        player.window = FeatureWindow()
        player.meter = PaceMeter()

        def redialled() -> None:
            player.connected = True
            for session in sessions:
                self._open(player, session)

        self.at(self.now + player.net.redial_s, redialled)
        for session in sessions:
            self._command(lambda s=session: self.engine.set_drafting(s, NO_DRAFTS))

    # The proposer.

    def _told_features(self, player: Player, rows: FeatureRows) -> None:
        order, size = rows.order, len(rows.rows)
        self._command(lambda: self.engine.features.give_back(rows.window, size))
        player.method.features(order.epoch, rows.start, rows.rows)
        if order.epoch in player.starved:
            player.starved.remove(order.epoch)
            player.wanting[order.epoch] = None

    def _told(self, player: Player, key: int, commit: Commit, step_s: float) -> None:
        if key in player.sessions:
            player.meter.step(step_s)
            verified = len(commit.token_ids) > 1
            player.meter.committed(key, self.now, step_s, verified=verified)
            k = commit.num_draft_tokens
            player.method.commit(key, commit.base_len, commit.token_ids, k)
            player.drafted.pop(key, None)
            player.starved.discard(key)
            if k:
                player.wanting[key] = None
            else:
                player.wanting.pop(key, None)

    def _closed(self, player: Player, key: int) -> None:
        player.method.close(key)
        for mapping in (player.sessions, player.wanting, player.drafted):
            mapping.pop(key, None)
        player.starved.discard(key)

    def _cycle(self, player: Player) -> None:
        if player.busy_until > self.now:
            return
        inbox, player.inbox = player.inbox, []
        for message in inbox:
            message()
        if player.wanting:
            round_ = self._timed(
                player,
                lambda: player.method.draft(list(player.wanting), player.meter.after(self.now)),
            )
            for key in (*(key for key, _ in round_.drafts), *round_.at_hand):
                del player.wanting[key]
                if not player.on_demand:
                    player.drafted[key] = None
            if player.method.traits.features is not None:
                for key in round_.unfinished:
                    del player.wanting[key]
                    player.starved.add(key)
            incarnation = player.incarnation

            def handed_over() -> None:
                if player.incarnation == incarnation:
                    for key, _ in round_.drafts:
                        player.meter.handed_over(key, self.now)

            self.at(player.busy_until, handed_over)
        elif player.drafted and player.method.traits.runs_ahead:
            keys = list(player.drafted)
            round_ = self._timed(
                player, lambda: player.method.ahead(keys, player.meter.after(self.now))
            )
            if not round_.trees:
                player.drafted.clear()
            incarnation = player.incarnation

            def handed_ahead() -> None:
                if player.incarnation == incarnation:
                    for key, _ in round_.trees:
                        player.meter.handed_ahead(key, self.now)

            self.at(player.busy_until, handed_ahead)
        else:
            return
        self.at(player.busy_until, lambda: self._cycle(player))

    def _timed(self, player: Player, work: Callable[[], DraftRound]) -> DraftRound:
        """Does the work now; its blocks leave when it would have been done."""
        started = player.clock.now
        round_ = work()
        elapsed = player.clock.now - started + 1e-5
        player.busy_until = self.now + elapsed
        incarnation = player.incarnation

        def leave() -> None:
            if player.incarnation != incarnation:
                return
            for key in round_.lost:
                player.wanting.pop(key, None)
                session = player.sessions.pop(key, None)
                if session is not None and player.keys.get(session) == key:
                    del player.keys[session]
                    self._open(player, session)
            us = round(elapsed * 1e6)
            blocks = [
                (player, incarnation, key, tree, us)
                for key, tree in (*round_.drafts, *round_.trees)
            ]
            if blocks:
                self._post(player, blocks)

        self.at(player.busy_until, leave)
        return round_

    def _post(self, player: Player, blocks: list[_Block]) -> None:
        """One message of a cycle's blocks; some may come again, or again and later."""
        net, rng = player.net, self.rng

        def arrive(blocks: list[_Block]) -> None:
            self._blocks += [(block, self.now) for block in blocks]
            self._work()

        self._travel(player, "from", lambda: arrive(blocks))
        for block in blocks:
            if rng.random() < net.repeat_chance:
                self._travel(player, "from", lambda block=block: arrive([block]))
            if rng.random() < net.reorder_chance:
                when = self.now + net.delay_s + rng.random() * 0.02
                self.at(when, lambda block=block: arrive([block]))


def _told_how(player: Player, events: StepEvents) -> None:
    player.on_demand = events.on_demand
