"""An engine and the proposer on its thread, which drafts behind the engine's steps."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import islice

from outrider.draft_port import DraftOffer
from outrider.drafting.proposer import Proposer, SessionStart
from outrider.engine.engine import Engine
from outrider.engine.runner import EagerStep, Pending, Runner
from outrider.engine.step import Step
from outrider.features import FeatureOrder, FeatureWindow
from outrider.params import SamplingParams, StopParams
from outrider.types import Request
from scorer_service.drafting.in_process import InProcessProposer

K = 4
SAMPLINGS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0, seed=5),
    SamplingParams(temperature=0.8, seed=2**63, top_k=9, top_p=0.9),
)


class DraftListener:
    """Nobody to be told; a draft that fails is a failed test."""

    def first_draft(self, session_id: int, epoch: int) -> None: ...

    def lost(self, session_id: int, epoch: int) -> None:  # noqa: ARG002
        raise AssertionError(f"session {session_id} is lost")

    def failed(self) -> None: ...


class DraftingScorer:
    """An engine, and the proposer on its thread, if it has one."""

    def __init__(self, engine: Engine, method: Proposer | None) -> None:
        self.engine = engine
        self.texts: dict[int, list[int]] = {}
        self._colocated: InProcessProposer | None = None
        self._spec = None if method is None else method.traits.features
        if method is not None:
            self._colocated = InProcessProposer(lambda: (method, "hash"), "here")
            self._colocated.build()
            self._colocated.listen(DraftListener())

    def begin(self, request: Request) -> None:
        session, prompt = request.session_id, request.prompt_token_ids
        self.texts[session] = []
        self.engine.submit(request)
        if self._colocated is not None:
            order = self._spec and FeatureOrder(1, self._spec, FeatureWindow())
            offer = DraftOffer("here", K, colocated=True, features=order)
            self.engine.set_drafting(session, offer)
            start = SessionStart((), request.sampling, K, len(prompt) + request.stop.max_tokens)
            self._colocated.open(self.engine, session, 1, start, len(prompt))

    def abort(self, session: int) -> None:
        """Forget a request, whatever is in flight."""
        self.engine.abort(session)
        if self._colocated is not None:
            self._colocated.close(session)

    def interrupt(self) -> None:
        """Be called while a step is in flight, with drafts behind it, and when it has ended."""

    def step(self) -> bool:
        """As the engine's thread does it; False if nothing runs any more."""
        if self._colocated is not None:
            self._colocated.draft_between_steps(self.engine)
        going = self.engine.launch()
        events = self.engine.finalize_step()
        for commit in () if events is None else events.commits:
            self.texts[commit.session_id] += commit.token_ids
        if self._colocated is not None:
            self._colocated.after_launch(self.engine)
        self.interrupt()
        self.engine.collect()
        self.interrupt()
        self.engine.check_invariants()
        return going

    def run(self, requests: Sequence[Request]) -> tuple[int, dict[int, list[int]]]:
        """Steps and texts; three requests begin at once, the others one after the other."""
        later = iter(requests)
        for request in islice(later, 3):
            self.begin(request)
        steps = 0
        while True:
            going = self.step()
            steps += going
            if not going or steps % 8 == 0:
                if (request := next(later, None)) is not None:
                    self.begin(request)
                elif not going:
                    return steps, self.texts


EDITED = SamplingParams(temperature=0.0, repetition_penalty=1.3)  # drawn apart


def draw_requests(
    vocab_size: int, seed: int = 2, samplings: Sequence[SamplingParams] = SAMPLINGS
) -> list[Request]:
    rng = random.Random(seed)
    return [
        Request(
            i,
            tuple(rng.randrange(vocab_size) for _ in range(rng.randint(2, 30))),
            samplings[i % len(samplings)],
            StopParams(max_tokens=rng.randint(20, 60)),
        )
        for i in range(7)
    ]


def enqueued(runner: Runner, step: Step) -> Pending:
    """Run a step when it is launched, as a device begins it then."""
    launched = EagerStep(runner, step)
    launched.run()
    return launched
