"""A scorer's engine, its hub and its proposers on a simulated clock: real code, made-up times.

What stands between them (streams, the threads of engine and proposers) is played here: messages
travel with delays, streams stall and break, blocks are repeated and reordered. Nothing sleeps.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

from outrider.config import EngineConfig
from outrider.draft_port import DraftOffer, PostedBlock
from outrider.engine.engine import Engine
from outrider.engine.step import Step
from outrider.features import FeatureWindow
from outrider.policy.base import Policy
from outrider.types import Commit, Request, StepEvents
from tests.support.models.hash_model import HashModel
from tests.support.simulators.methods import VOCAB
from tests.support.simulators.network import Network

StepS = Callable[[Step], float]


class World(Network):
    """Runs requests to their end: see `committed` and `last`; or `set_rows` without end."""

    answer_len = 0  # tokens of each request that follows another

    def __init__(
        self,
        policy: Policy,
        config: EngineConfig,
        step_s: StepS,
        rng: random.Random,
        model: HashModel | None = None,
        **parts: Any,
    ) -> None:
        """`parts` are those of the engine that it does not make itself."""
        max_len, k = config.max_model_len, config.num_speculative_tokens
        self.model = model = model or HashModel(VOCAB, config.page_size, config.num_pages, max_len)
        self.policy, self.step_s = policy, step_s
        self._step_now = 0.005  # seconds of the last step that was launched
        self.engine = Engine(model, config, policy=policy, clock=lambda: self.now, **parts)
        served = {"vocab_size": model.vocab_size, "features": self.engine.info.features}
        super().__init__(self, rng, k, max_model_len=max_len, **served)
        self.requests, self.last = dict[int, Request](), dict[int, Commit]()
        self.committed: dict[int, list[int]] = {}
        self.num_tokens = 0  # since `rate` began
        self._commands: list[Callable[[], object]] = []
        self._in_flight = False
        self.num_rows, self._most_rows = 0, config.max_num_seqs

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
        if after:
            self.run(self.now + after)
        self.num_tokens = 0
        self.run(self.now + seconds)
        return self.num_tokens / seconds

    _request: Callable[[int], Request]  # makes the one that follows those so far, of so many tokens

    # What the hub sees of the engine.

    running = True

    @property
    def features(self) -> World:
        return self

    def submit(self, request: Request, _constraint: object) -> None:
        self.engine.submit(request)

    @property
    def drafting(self) -> bool:
        rows = min(len(self.requests) - len(self.last), self._most_rows)
        return rows.bit_length() not in self.engine.snapshot().undrafted_sizes

    def between_same_steps(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def set_drafting(self, session: int, offer: DraftOffer) -> None:
        self._command(partial(self.engine.set_drafting, session, offer))

    def post_blocks(self, blocks: Iterable[PostedBlock]) -> None:
        for block in blocks:
            self._command(partial(self.engine.post_block, block._replace(arrived_at=self.now)))

    def give_back(self, window: FeatureWindow, size: int) -> None:
        assert self.engine.features is not None
        self._command(partial(self.engine.features.give_back, window, size))

    # The engine's thread.

    def _command(self, command: Callable[[], object]) -> None:
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
        if flight := self.engine._in_flight:
            self._step_now = self.step_s(flight.step)
            self._takes(self._step_now, self._collect)
        self._finalize(self.engine.wake_at)
        if not self._in_flight:
            self.engine.check_invariants()

    def _carry_out(self) -> None:
        for command in self._commands:
            command()
        self._commands.clear()

    def _finalize(self, wake_at: float) -> None:
        events = self.engine.finalize_step()
        if not self._in_flight and wake_at < float("inf"):
            self.at(max(self.now, wake_at), self._work)
        if events is not None:
            self._publish(events)

    def _collect(self) -> None:
        self._in_flight = False
        self._work()

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
            timings = replace(timings, forward_ms=1e3 * self._step_now, verify_ms=0.0)
        self._tell(self.hub.on_events, replace(events, timings=timings, counts=None))
