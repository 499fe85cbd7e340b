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
from functools import partial
from typing import Any

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
from outrider.policy.base import DraftMode, Policy
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

    def __init__(self, clock: Clock, eps: float, forward_s: float, **sizes: int):
        super().__init__(VOCAB, **sizes)
        self._clock, self._eps, self._forward_s = clock, eps, forward_s

    def forward(self, batch: PackedBatch) -> Tensor:
        self._clock.now += self._forward_s
        return super().forward(batch)

    def _logits(self, states):  # type: ignore[no-untyped-def]
        other = super()._logits(states ^ 0x5BD1E995)
        return (1 - self._eps) * super()._logits(states) + self._eps * other


@dataclass
class Stream:
    """A connection, and what the proposer's thread keeps of the sessions on it."""

    connected: bool = True
    arrival: dict[str, float] = field(default_factory=lambda: {"to": 0.0, "from": 0.0})
    inbox: list[Callable[[], None]] = field(default_factory=list)
    sessions: dict[int, int] = field(default_factory=dict)  # by key, which no other stream has
    keys: dict[int, int] = field(default_factory=dict)  # by session, as the scorer knows it
    wanting: dict[int, None] = field(default_factory=dict)
    drafted: dict[int, None] = field(default_factory=dict)
    starved: set[int] = field(default_factory=set)  # keys that want a draft and lack features
    window: FeatureWindow = field(default_factory=FeatureWindow)
    meter: PaceMeter = field(default_factory=PaceMeter)


@dataclass
class Player:
    """A proposer with its stream and thread."""

    id: str
    method: Proposer
    clock: Clock
    net: Net
    own_device: bool = False  # not the engine's
    on_demand: bool = False  # it is not to run ahead
    busy: bool = False
    stream: Stream = field(default_factory=Stream)


_Block = tuple[Player, int, DraftTree, int]  # key, tree, microseconds


def draft_model(
    eps: float = 0.2,
    forward_s: float = 0.0006,
    *,
    max_branches: int = 8,
    num_pages: int = 4096,
    max_model_len: int = MAX_LEN,
) -> tuple[Proposer, Clock]:
    clock = Clock()
    sizes = {"page_size": 4, "num_pages": num_pages, "max_model_len": max_model_len}
    model = DraftHash(clock, eps, forward_s, **sizes)
    return drafting_with(model, clock, max_branches=max_branches), clock


def drafting_with(
    model: Any, clock: Callable[[], float], *, own_loops: bool = False, **limits: int
) -> Proposer:
    """`own_loops`: the model has the chains and forks itself."""
    return DraftModelProposer(
        model,
        name="draft",
        limits=ProposerLimits(**limits),
        chain_drafter=model if own_loops else None,
        fork_drafter=model if own_loops else EagerForks(model),
        clock=clock,
    )


COPYING = {
    "ngram": partial(NgramProposer, prompt_lookup_min=1),
    "suffix": SuffixProposer,
    "deterministic": DeterministicProposer,
}


def copying(method: str, max_branches: int = 8) -> tuple[Proposer, Clock]:
    return COPYING[method](max_branches=max_branches), Clock()


def hybrid(*methods: tuple[Proposer, Clock]) -> tuple[Proposer, Clock]:
    """Several methods in one proposer, which takes the time of the last."""
    return HybridProposer([method for method, _ in methods]), methods[-1][1]


class World:
    """Runs requests to their end: see `committed` and `last`; or `set_rows` without end."""

    answer_len = 0  # tokens of each request that follows another

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
        self.rng, self.policy = rng, policy
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
        self._k = config.num_speculative_tokens
        self.step_s = step_s
        self.players: list[Player] = []
        self.requests: dict[int, Request] = {}
        self.committed: dict[int, list[int]] = {}
        self.last: dict[int, Commit] = {}
        self.rows_per_step: list[int] = []
        self.steps = self.steps_on_demand = 0  # since `rate` began
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._blocks: list[tuple[_Block, float]] = []  # and when each came
        self._commands: list[Callable[[], None]] = []
        self._in_flight = False
        self._rows = 0
        self._keys = itertools.count(1)

    def at(self, when: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), what))

    def add(self, method: tuple[Proposer, Clock], net: Net, *, own_device: bool = False) -> Player:
        player = Player(f"p{len(self.players)}", *method, net, own_device)
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
        self.at(until, lambda: None)
        while len(self.last) < len(self.requests) and self.now < until:
            self.step()
            self.set_rows(self._rows)

    def set_rows(self, rows: int, *, apart: bool = False) -> None:
        """Keep `rows` requests in flight. `apart`: the first answers end one after the other."""
        self._rows = rows
        for i in range(len(self.requests) - len(self.last), rows):
            self.submit(
                self._request(self.answer_len * (i + 1) // rows if apart else self.answer_len)
            )

    def rate(self, seconds: float, *, after: float = 0.0) -> float:
        """Tokens per second of so many, which begin after others."""
        if after:
            self.run(self.now + after)
        before, until = self.num_tokens, self.now + seconds
        self.steps = self.steps_on_demand = 0
        self.run(until)
        return (self.num_tokens - before) / seconds

    @property
    def num_tokens(self) -> int:
        """Return the tokens of all answers so far."""
        prompts = [len(request.prompt_token_ids) for request in self.requests.values()]
        return sum(map(len, self.committed.values())) - sum(prompts)

    def step(self) -> None:
        """What happens next."""
        assert self._events, "nothing will ever happen again"
        when, _, what = heapq.heappop(self._events)
        self.now = max(self.now, when)
        assert self.now < 3600, "livelock"
        what()
        if not self._in_flight:
            self.engine.check_invariants()

    # What subclasses have of their own: requests that follow others, and times.

    def _request(self, max_tokens: int) -> Request:
        raise NotImplementedError

    def _takes(self, seconds: float, then: Callable[[], None]) -> None:
        """The engine's step or a proposer's work takes so long."""
        self.at(self.now + seconds, then)

    def _way_s(self, player: Player, num_parts: int) -> float:  # noqa: ARG002
        return player.net.delay_s

    def _python_s(self, round_: DraftRound) -> float:  # noqa: ARG002
        return 1e-5

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
        self._carry_out()
        self._in_flight = self.engine.launch()
        if self._in_flight:
            flight = self.engine._in_flight
            assert flight is not None
            self.rows_per_step.append(len(flight.step.rows))
            self._takes(self.step_s(flight.step.num_tokens), self._collect)
        self._finalize(self.engine.wake_at)

    def _carry_out(self) -> None:
        for command in self._commands:
            command()
        self._commands.clear()
        for (player, key, tree, draft_us), came_at in self._blocks:
            session = player.stream.sessions.get(key)
            if session is not None and player.stream.keys.get(session) == key:
                self.engine.post_block(PostedBlock(session, tree, player.id, draft_us, came_at))
        self._blocks.clear()

    def _finalize(self, wake_at: float) -> None:
        events = self.engine.finalize_step()
        if not self._in_flight and wake_at < float("inf"):
            self.at(max(self.now, wake_at), self._work)
        if events is not None:
            assert not events.failures
            for rows in () if events.features is None else events.features.rows:
                for player in self.players:
                    if player.stream.window is rows.order.window:
                        self._send(player, partial(self._told_features, player, rows))
            if events.timings is not None:
                self._publish(events, self.step_s(events.timings.num_tokens))

    def _collect(self) -> None:
        self.steps += 1
        self.steps_on_demand += self.policy.mode is DraftMode.ON_DEMAND
        self._in_flight = False
        self._work()

    def _publish(self, events: StepEvents, step_s: float) -> None:
        for commit in events.commits:
            session = commit.session_id
            assert commit.base_len == len(self.committed[session])
            self.committed[session] += commit.token_ids
            if commit.finish_reason is not None:
                self.last[session] = commit
        for player in self.players:
            parts: list[Callable[[], None]] = []
            for commit in events.commits:
                if (key := player.stream.keys.get(commit.session_id)) is None:
                    continue
                if commit.finish_reason is not None:
                    del player.stream.keys[commit.session_id]
                    parts.append(partial(self._closed, player, key))
                else:
                    parts.append(partial(self._told, player, key, commit, step_s))
            if parts:
                how = partial(setattr, player, "on_demand", events.on_demand)
                self._send(player, how, *parts)

    def _open(self, player: Player, session: int) -> None:
        stream, traits = player.stream, player.method.traits
        if not stream.connected or session in self.last:
            return
        key = next(self._keys)
        stream.keys[session], stream.sessions[key] = key, session
        snapshot = self.engine.snapshot()
        asked = (snapshot.running + snapshot.waiting).bit_length() not in snapshot.undrafted_sizes
        k = min(traits.max_draft_tokens, self._k)
        offer = DraftOffer(
            player.id,
            k,
            runs_ahead=traits.runs_ahead,
            own_device=player.own_device,
            requested=asked,
            features=traits.features and FeatureOrder(key, traits.features, stream.window),
        )
        self._command(lambda: self.engine.set_drafting(session, offer))
        request, prefix = self.requests[session], list(self.committed[session])
        prompt_len = len(request.prompt_token_ids)
        start = SessionStart(
            prefix,
            request.sampling,
            k,
            max_len=prompt_len + request.stop.max_tokens,
            advice=request.speculation.advice,
            num_output_tokens=len(prefix) - prompt_len,
        )

        def opened() -> None:
            player.method.open(key, start)
            if asked:
                stream.wanting[key] = None

        self._send(player, opened)

    # The way between them.

    def _send(self, player: Player, *parts: Callable[[], None]) -> None:
        """One message, as of all that a step committed."""
        stream = player.stream

        def arrive() -> None:
            if player.stream is stream:
                stream.inbox += parts
                self._cycle(player)

        self._travel(player, "to", len(parts), arrive)

    def _post(self, player: Player, blocks: list[_Block]) -> None:
        """One message of a cycle's blocks; some may come again, or again and later."""
        net, rng = player.net, self.rng

        def arrive(blocks: list[_Block]) -> None:
            self._blocks += [(block, self.now) for block in blocks]
            self._work()

        self._travel(player, "from", len(blocks), partial(arrive, blocks))
        for block in blocks:
            if rng.random() < net.repeat_chance:
                self._travel(player, "from", 1, partial(arrive, [block]))
            if rng.random() < net.reorder_chance:
                self.at(self.now + net.delay_s + rng.random() * 0.02, partial(arrive, [block]))

    def _travel(self, player: Player, way: str, num_parts: int, arrive: Callable[[], None]) -> None:
        net, rng, stream = player.net, self.rng, player.stream
        if rng.random() < net.break_chance:
            self._break(player)
            return
        delay = self._way_s(player, num_parts) + rng.random() * net.jitter_s
        if rng.random() < net.stall_chance:
            delay += rng.random() * net.stall_s
        stream.arrival[way] = max(stream.arrival[way], self.now + delay)
        self.at(stream.arrival[way], arrive)

    def _break(self, player: Player) -> None:
        """Everything on its way is lost, and the proposer's sessions with it."""
        broken = player.stream
        if not broken.connected:
            return
        player.stream = stream = Stream(connected=False)
        for key in broken.sessions:
            player.method.close(key)
        sessions = [session for session in broken.keys if session not in self.last]

        def redialled() -> None:
            stream.connected = True
            for session in sessions:
                self._open(player, session)

        self.at(self.now + player.net.redial_s, redialled)
        for session in sessions:
            self._command(lambda s=session: self.engine.set_drafting(s, NO_DRAFTS))

    # The proposer.

    def _told_features(self, player: Player, rows: FeatureRows) -> None:
        stream, key, size = player.stream, rows.order.epoch, len(rows.rows)
        self._command(lambda: self.engine.features.give_back(rows.window, size))
        player.method.features(key, rows.start, rows.rows)
        if key in stream.starved:
            stream.starved.remove(key)
            stream.wanting[key] = None

    def _told(self, player: Player, key: int, commit: Commit, step_s: float) -> None:
        stream, k = player.stream, commit.num_draft_tokens
        if key in stream.sessions:
            stream.meter.step(step_s)
            verified = len(commit.token_ids) > 1
            stream.meter.committed(key, self.now, step_s, verified=verified)
            player.method.commit(key, commit.base_len, commit.token_ids, k)
            stream.drafted.pop(key, None)
            stream.starved.discard(key)
            if k:
                stream.wanting[key] = None
            else:
                stream.wanting.pop(key, None)

    def _closed(self, player: Player, key: int) -> None:
        player.method.close(key)
        stream = player.stream
        for mapping in (stream.sessions, stream.wanting, stream.drafted):
            mapping.pop(key, None)
        stream.starved.discard(key)

    def _cycle(self, player: Player) -> None:
        """The thread takes what has come, and drafts. Blocks leave when that would be done."""
        stream, method = player.stream, player.method
        if player.busy:
            return
        inbox, stream.inbox = stream.inbox, []
        for message in inbox:
            message()
        pace, started = stream.meter.after(self.now), player.clock.now
        if stream.wanting:
            round_ = method.draft(list(stream.wanting), pace)
            note, noted = stream.meter.handed_over, round_.drafts
            for key in (*(key for key, _ in round_.drafts), *round_.at_hand):
                del stream.wanting[key]
                if not player.on_demand:
                    stream.drafted[key] = None
            for key in round_.unfinished if method.traits.features is not None else ():
                del stream.wanting[key]
                stream.starved.add(key)
        elif stream.drafted and method.traits.runs_ahead:
            round_ = method.ahead(list(stream.drafted), pace)
            note, noted = stream.meter.handed_ahead, round_.trees
            if not round_.trees:
                stream.drafted.clear()
        else:
            return
        elapsed_s = player.clock.now - started + self._python_s(round_)

        def done() -> None:
            player.busy = False
            if player.stream is stream:
                self._hand_over(player, round_, round(elapsed_s * 1e6))
                for key, _ in noted:
                    note(key, self.now)
            self._cycle(player)

        player.busy = True
        self._takes(elapsed_s, done)

    def _hand_over(self, player: Player, round_: DraftRound, draft_us: int) -> None:
        stream = player.stream
        for key in round_.lost:
            stream.wanting.pop(key, None)
            session = stream.sessions.pop(key, None)
            if session is not None and stream.keys.get(session) == key:
                del stream.keys[session]
                self._open(player, session)
        if blocks := [(player, *each, draft_us) for each in (*round_.drafts, *round_.trees)]:
            self._post(player, blocks)
