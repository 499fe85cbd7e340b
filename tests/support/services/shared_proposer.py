"""Several scorers' hubs over one proposer's drafting cycle: without RPC, engine or time."""

from __future__ import annotations

from outrider.drafting.proposer import Proposer
from outrider.rpc.feature_codec import SessionMessage
from outrider.rpc.telemetry import configure
from outrider.types import FinishReason
from outrider.v1 import draft_pb2
from proposer_service.cycle import Attach, Batch, Cycle
from proposer_service.metrics import ProposerMetrics
from scorer_service.drafting.attached import AttachedProposer
from scorer_service.sessions import Session
from tests.support.services.hub import Bench, commit, taken
from tests.support.simulators.methods import Clock


class Scorer:
    """A hub, its running requests and how many tokens each of them still generates."""

    def __init__(self, link: int, clock: Clock, max_sessions: int) -> None:
        self.link = link
        self.bench = Bench(clock=clock)
        self.proposer: AttachedProposer = self.bench.attach(
            "shared", method="ngram", max_sessions=max_sessions
        )
        self.running: dict[Session, int] = {}
        self.opened: list[int] = []  # session ids, of all Opens
        self.refused: list[int] = []  # of sessions lost that had no draft since their Open
        self.evicted: list[int] = []  # and of those that had
        self.drafted: set[tuple[int, int]] = set()  # sessions and epochs
        self.received: list[draft_pb2.DraftRequest] = []

    @property
    def undrafted(self) -> list[Session]:
        return [session for session in self.running if session.proposer is None]

    def submit(self, count: int, num_tokens: int = 10**9) -> list[Session]:
        sessions = [self.bench.submit((1, 2, 1, 2)) for _ in range(count)]
        self.running.update(dict.fromkeys(sessions, num_tokens))
        return sessions

    def step(self) -> None:
        """Every running request generates a token."""
        commits = []
        for session in self.running:
            self.running[session] -= 1
            finish = None if self.running[session] else FinishReason.LENGTH
            commits.append(commit(session, 1, finish=finish))
        self.running = {session: left for session, left in self.running.items() if left}
        self.bench.step(*commits)

    def take(self) -> SessionMessage | None:
        """Return what waits to be sent to the proposer."""
        message = taken(self.bench.hub, self.proposer)
        if message is not None:
            self.opened += [opened.session for opened in message.batch.opens]
        return message

    def read(self) -> None:
        """What the proposer has sent."""
        while self.received:
            message = self.received.pop(0)
            if message.HasField("blocks"):
                self.drafted |= {(block.session, block.epoch) for block in message.blocks.blocks}
                self.bench.hub.blocks.receive(self.proposer, message.blocks.blocks)
            else:
                lost = message.lost
                had_drafts = (lost.session, lost.epoch) in self.drafted
                (self.evicted if had_drafts else self.refused).append(lost.session)
                self.bench.hub.registry.on_lost(self.proposer, lost)


class SharedProposer:
    """One proposer that `num_scorers` scorers share."""

    def __init__(self, method: Proposer, clock: Clock, num_scorers: int) -> None:
        self.clock = clock
        telemetry = configure("proposer")
        self._cycle = Cycle(method, ProposerMetrics(telemetry.registry), telemetry)
        self.scorers = [
            Scorer(link, clock, method.traits.max_sessions) for link in range(num_scorers)
        ]
        self._cycle.apply([Attach(s.link, s.received.extend, 512) for s in self.scorers])

    def exchange(self) -> None:
        """All that is to be said is said and answered."""
        said = True
        while said:
            said = False
            for scorer in self.scorers:
                message = scorer.take()
                if message is not None:
                    said = True
                    self._cycle.apply([Batch(scorer.link, message.batch, 0.0)])
            self._cycle.draft()
            for scorer in self.scorers:
                scorer.read()

    def run(self, rounds: int, step_s: float = 0.05) -> None:
        """So many rounds of all scorers."""
        for _ in range(rounds):
            self.clock.now += step_s
            for scorer in self.scorers:
                scorer.step()
            self.exchange()
