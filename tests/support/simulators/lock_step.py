"""Requests in vLLM's lock step on one simulated device, and their draft model on another.

Between both is the plug-in's host with its policy and hub, and a proposer's cycle. Times were
measured on two H200s with an 8B target and a 1B draft.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from outrider.draft_port import PostedBlock
from outrider.params import SamplingParams, StopParams
from outrider.types import Request, RequestStats, StepEvents
from outrider.vllm.draft_host import DraftHost, Listener
from outrider.vllm.waiting import LockstepPolicy
from tests.support.simulators.devices import AGREEMENT, ANSWER, K, ShortSighted, draft_1b
from tests.support.simulators.simulation import VOCAB, Net, Network

PROMPT, CONTEXT = 64, 1024
_ROWS, _PLAIN_MS, _VERIFYING_MS = (1, 8, 32), (4.5, 4.9, 6.4), (5.2, 5.7, 9.0)
_HOST_S = 2e-3  # between steps
_NET = Net(1e-3, commit_s=30e-6, chain_s=40e-6, tree_s=40e-6)


class _Host(DraftHost):
    """Waits for blocks in simulated time."""

    world: LockStep

    def take(self, timeout_s: float = 0.0) -> Any:
        self.world.go_on(timeout_s, until_blocks=True)
        return super().take()

    def post_blocks(self, blocks: Iterable[PostedBlock]) -> None:
        super().post_blocks([block._replace(arrived_at=self.world.now) for block in blocks])


class LockStep(Network, Listener):
    """`rows` requests in flight, each followed by the next."""

    def __init__(self, rows: int) -> None:
        self._num_rows = rows
        self.policy, limits = LockstepPolicy(K), (K, CONTEXT, 64)
        self.host = _Host(*limits, policy=self.policy, max_graph_rows=64, clock=lambda: self.now)
        self.host.world = self.host.listener = self
        super().__init__(self.host, random.Random(1), K, vocab_size=VOCAB, max_model_len=CONTEXT)
        draft = draft_1b(16_384, max_sessions=64, prefill_budget=1 << 16)
        self.add(draft, _NET, own_device=True)
        self._target, self._ends = ShortSighted(VOCAB, 1, 1), dict[str, int]()
        self._texts, self._drafts = dict[str, list[int]](), dict[str, list[int]]()
        self._finished: list[str] = []
        self.stats: list[RequestStats] = []
        self.tokens = 0

    def rate(self, seconds: float) -> float:
        """Run for so long; return tokens per second, and keep the accounts of what ended then."""
        end, began, self.tokens, self.stats = self.now + seconds, self.now, 0, []
        while self.now < end:
            self._run_step()
        return self.tokens / (self.now - began)

    def go_on(self, seconds: float, *, until_blocks: bool = False) -> None:
        """Let time pass, and the proposer draft meanwhile."""
        end = self.now + seconds
        while self._events[:1] and self._events[0][0] <= end:
            if until_blocks and self.host._blocks:
                return
            self.step()
        self.now = end

    def _run_step(self) -> None:
        opened = [self._open() for _ in range(self._num_rows - len(self._texts))]
        names = list(self._texts)
        verified = {name: draft for name, draft in self._drafts.items() if draft}
        self.go_on(_HOST_S)
        scheduled = {name: 1 + len(verified.get(name, ())) for name in names}
        scheduled |= {f"{request.session_id}": PROMPT for request in opened}
        self.host.begin_step(self._finished, scheduled, verified)
        for request in opened:
            self.host.open(f"{request.session_id}", request, frozenset())
        ended = [self.host.take_stats(name) for name in self._finished]
        self.stats += [stats for stats in ended if stats is not None]
        self.host.account()
        times = _VERIFYING_MS if verified else _PLAIN_MS
        self.go_on(1e-3 * float(np.interp(len(names), _ROWS, times)) + 2e-3 * bool(opened))
        emitted = [self._verified(name) for name in names]
        lengths = [len(self._texts[name]) for name in names]
        self.host.commit(names, emitted, lengths, lambda row, n: self._texts[names[row]][:n])
        self._drafts = dict(zip(names, self.host.choose_drafts(names), strict=True))
        self._finished = [name for name in names if len(self._texts[name]) >= self._ends[name]]
        for name in self._finished:
            del self._texts[name], self._drafts[name]

    def _open(self) -> Request:
        session = self.host.next_session_id()
        prompt = [len(AGREEMENT) - 1, *self.rng.choices(range(VOCAB), k=PROMPT - 1)]
        # The first ones end one after the other.
        answer = ANSWER if session > self._num_rows else ANSWER * session // self._num_rows
        self._texts[f"{session}"], self._ends[f"{session}"] = prompt, PROMPT + answer
        stop = StopParams(max_tokens=answer, ignore_eos=True)
        return Request(session, tuple(prompt), SamplingParams(temperature=0.0), stop)

    def _verified(self, name: str) -> list[int]:
        text, draft, emitted = self._texts[name], self._drafts.get(name, []), list[int]()
        while len(emitted) <= len(draft) and emitted == draft[: len(emitted)]:
            known = np.array([*text, *emitted])
            logits = self._target.logits_at(np.array([len(known) - 1]), known.take)
            emitted.append(int(logits.argmax()))
        emitted = emitted[: self._ends[name] - len(text)]
        text += emitted
        self.tokens += len(emitted)
        return emitted

    # The host's listener.

    def opened(self, request: Request, traceparent: str) -> None:
        self._tell(self.hub.submit, request, traceparent)

    def stepped(self, events: StepEvents) -> None:
        self._tell(self.hub.on_events, replace(events, counts=None))
