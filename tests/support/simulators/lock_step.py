"""Requests in vLLM's lock step on one simulated device, and their draft model on another.

Between both is the plug-in's host with its policy, and a proposer's cycle, which runs in its own
time. Times were measured on two H200s with an 8B target and a 1B draft.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from outrider.draft_port import DraftOffer, PostedBlock
from outrider.draft_tree import DraftTree
from outrider.drafting.drafters import Chain, DraftInput, Forks
from outrider.engine.batch import RowSlice
from outrider.params import SamplingParams, SpeculationParams, StopParams
from outrider.rpc.telemetry import configure
from outrider.types import Request, RequestStats, StepEvents
from outrider.v1 import draft_pb2
from outrider.vllm.draft_host import DraftHost, Listener
from outrider.vllm.waiting import LockstepPolicy
from proposer_service import cycle
from proposer_service.metrics import ProposerMetrics
from tests.support.services.draft_scorer import close, commit, open_
from tests.support.simulators.simulation import drafting_with
from tests.support.simulators.two_devices import DRAFT_MS, DRAFT_ROWS

K, PROMPT, ANSWER, CONTEXT = 4, 64, 256, 1024
_BY_RANK = (0.92, 0.96, 0.976, 0.984)  # of draft tokens: the truth is the first, or so far below
_ROWS, _PLAIN_MS, _VERIFYING_MS = (1, 8, 32), (4.5, 4.9, 6.4), (5.2, 5.7, 9.0)
_HOST_S = 2e-3  # between steps
_WAY_S = 1e-3  # from a commit to the proposer, and from its draft to the engine
_SESSION_S, _TREE_S = 30e-6, 40e-6  # of the proposer's Python: a commit and its plan, and a tree
_POLL_S = 1e-4


def truth(session: int, position: int) -> int:
    """The target's token, which names its session."""
    return session << 8 | _chance(session, position, 1) & 127


def _chance(*numbers: int) -> int:
    found = 0
    for number in numbers:
        found = (found ^ number) * 0x2C1B3C6D & 0xFFFFFFFF
        found ^= found >> 15
    return found


class _Draft:
    """A model that mostly finds the truth; it is mostly unsure where it does not."""

    page_size, num_pages, max_model_len, vocab_size = 16, 16_384, CONTEXT, 1 << 20
    max_tokens = 1 << 30

    def __init__(self) -> None:
        self.now = 0.0

    def _spend(self, rows: int, forwards: int) -> None:
        self.now += 1e-3 * forwards * float(np.interp(rows, DRAFT_ROWS, DRAFT_MS))

    def feed(self, slices: Sequence[RowSlice]) -> bool:
        self._spend(len(slices), 2)
        return True

    def draft(self, rows: Sequence[DraftInput]) -> list[Chain]:
        self._spend(len(rows), rows[0].wanted)
        return [
            ([self._candidates(row.slice, row.end + i)[0][0] for i in range(row.wanted)], b"")
            for row in rows
        ]

    def forks(
        self,
        slices: Sequence[RowSlice],
        _sampling: Sequence[SamplingParams],
        num_tokens: int,
        fanout: int,
        *_copies: object,
    ) -> Forks:
        self._spend(len(slices), num_tokens + 1)
        found = [
            [self._candidates(row, row.start + len(row.token_ids) + i) for row in slices]
            for i in range(num_tokens + 1)
        ]
        both = np.array(found).transpose(2, 1, 0, 3)  # [2, rows, places, 8]
        tokens, gaps = both[0, ..., :fanout], both[1, ..., :fanout]
        return Forks(tokens.astype(np.int32), gaps.astype(np.float32))

    def _candidates(self, row: RowSlice, position: int) -> tuple[list[int], list[float]]:
        session = row.token_ids[-1] >> 8
        luck = _chance(session, position, 2) / 2**32
        rank = bisect_right(_BY_RANK, luck)
        tokens = [session << 8 | 128 + i for i in range(8)]
        if rank < 4:  # else it is none of them
            tokens[rank] = truth(session, position)
        first = 0.4 if rank or _chance(session, position, 3) % 4 == 0 else 6.0
        return tokens, [0.0, *(first + 0.5 * i for i in range(7))]


class LockStep(Listener):
    """`rows` requests in flight, each followed by the next."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
        self._num_rows = rows
        self.now = 0.0
        self.policy = LockstepPolicy(K)
        self.host = DraftHost(
            K, CONTEXT, 64, policy=self.policy, max_graph_rows=64, clock=lambda: self.now
        )
        self.host.listener = self
        self._take = self.host.take
        monkeypatch.setattr(self.host, "take", self._take_in_time)
        self._draft = model = _Draft()
        monkeypatch.setattr(cycle, "time", SimpleNamespace(perf_counter=lambda: model.now))
        limits = {"max_sessions": 64, "prefill_budget": 1 << 16}
        proposer = drafting_with(model, lambda: model.now, own_loops=True, **limits)
        metrics = ProposerMetrics(CollectorRegistry(), "default")
        self._cycle = cycle.Cycle(proposer, metrics, configure("outrider-proposer"))
        self._cycle.apply([cycle.Attach(1, self._send, 512)])
        self._spare = False  # the proposer may have something to draft ahead
        self._inbox: deque[tuple[float, bytes]] = deque()
        self._blocks: deque[tuple[float, list[draft_pb2.Block]]] = deque()
        self._texts: dict[str, list[int]] = {}
        self._ends: dict[str, int] = {}
        self._drafts: dict[str, list[int]] = {}
        self._finished: list[str] = []
        self.stats: list[RequestStats] = []
        self.tokens = 0
        self.propose_s: list[float] = []  # CPU time of each step's choice of drafts
        self._world_s = 0.0  # CPU time of the simulation within them

    def rate(self, seconds: float) -> float:
        """Run for so long; return tokens per second, and keep the accounts of what ended then."""
        end, began, self.tokens, self.stats = self.now + seconds, self.now, 0, []
        while self.now < end:
            self._step()
        return self.tokens / (self.now - began)

    def _step(self) -> None:
        opened = [self._open() for _ in range(self._num_rows - len(self._texts))]
        names, drafts = list(self._texts), self._drafts
        verified = {name: draft for name, draft in drafts.items() if draft}
        self.now += _HOST_S
        scheduled = {name: 1 + len(drafts.get(name, ())) for name in names}
        scheduled |= {f"{request.session_id}": PROMPT for request in opened}
        self.host.begin_step(self._finished, scheduled, verified)
        for request in opened:
            self.host.open(f"{request.session_id}", request, frozenset())
        ended = [self.host.take_stats(name) for name in self._finished]
        self.stats += [stats for stats in ended if stats is not None]
        self.host.account()
        times = _VERIFYING_MS if verified else _PLAIN_MS
        self.now += 1e-3 * float(np.interp(len(names), _ROWS, times)) + 2e-3 * bool(opened)
        emitted = [self._verified(name) for name in names]
        lengths = np.array([len(self._texts[name]) for name in names], np.int32)
        table = np.zeros((len(names), CONTEXT), np.int32)  # only read if the host lost its place
        began, self._world_s = time.thread_time(), 0.0
        self.host.commit(names, emitted, lengths, table)
        chosen = self.host.choose_drafts(names)
        self.propose_s.append(time.thread_time() - began - self._world_s)
        self._drafts = dict(zip(names, chosen, strict=True))
        self._finished = [name for name in names if len(self._texts[name]) >= self._ends[name]]
        for name in self._finished:
            del self._texts[name], self._drafts[name]

    def _open(self) -> Request:
        session = self.host.next_session_id()
        prompt = [truth(session, i) for i in range(PROMPT)]
        # The first ones end one after the other.
        answer = ANSWER if session > self._num_rows else ANSWER * session // self._num_rows
        self._texts[f"{session}"], self._ends[f"{session}"] = prompt, PROMPT + answer
        stop = StopParams(max_tokens=answer, ignore_eos=True)
        sampling = SamplingParams(temperature=0.0)
        return Request(session, tuple(prompt), sampling, stop, SpeculationParams())

    def _verified(self, name: str) -> list[int]:
        text, draft, session = self._texts[name], self._drafts.get(name, []), int(name)
        emitted = [truth(session, len(text))]
        while len(emitted) <= len(draft) and draft[len(emitted) - 1] == emitted[-1]:
            emitted.append(truth(session, len(text) + len(emitted)))
        emitted = emitted[: self._ends[name] - len(text)]
        text += emitted
        self.tokens += len(emitted)
        return emitted

    # The host's listener: messages to the proposer.

    def opened(self, request: Request, traceparent: str) -> None:  # noqa: ARG002
        session = request.session_id
        opens = [open_(session, list(request.prompt_token_ids), k=K, max_len=CONTEXT)]
        self._tell(draft_pb2.SessionBatch(opens=opens))
        self.host.set_drafting(session, DraftOffer("p", K, runs_ahead=True, own_device=True))

    def stepped(self, events: StepEvents) -> None:
        began = time.thread_time()
        step_us = 0 if events.timings is None else round(events.timings.forward_ms * 1e3)
        batch = draft_pb2.SessionBatch(step_us=step_us, on_demand=events.on_demand)
        for each in events.commits:
            session, k = each.session_id, each.num_draft_tokens
            if each.finish_reason is not None:
                batch.closes.append(close(session))
            else:
                batch.commits.append(commit(session, each.base_len, list(each.token_ids), k=k))
        if events.commits:
            self._tell(batch)
        self._world_s += time.thread_time() - began

    def _tell(self, batch: draft_pb2.SessionBatch) -> None:
        self._inbox.append((self.now + _WAY_S, batch.SerializeToString()))

    # The proposer.

    def _run_proposer(self) -> None:
        """Let it begin what it can begin until now."""
        draft = self._draft
        while draft.now < self.now:
            arrived: list[cycle.Batch] = []
            while self._inbox and self._inbox[0][0] <= draft.now:
                at, message = self._inbox.popleft()
                arrived.append(cycle.Batch(1, draft_pb2.SessionBatch.FromString(message), at))
            if arrived:
                self._cycle.apply(arrived)
                draft.now += _SESSION_S * sum([len(each.message.commits) for each in arrived])
            if arrived or self._cycle.has_work:
                self._cycle.draft()
                self._spare = True
            elif self._spare:
                self._spare = self._cycle.ahead()
            else:
                draft.now = min(self.now, self._inbox[0][0]) if self._inbox else self.now

    def _send(self, messages: Sequence[draft_pb2.DraftRequest]) -> None:
        blocks = [block for message in messages for block in message.blocks.blocks]
        self._draft.now += _TREE_S * len(blocks)
        self._blocks.append((self._draft.now + _WAY_S, blocks))

    def _take_in_time(self, timeout_s: float = 0.0) -> Any:
        """Do what `Inbox.take` does, in simulated time."""
        end = self.now + timeout_s
        self._deliver()
        while self.now < end and not self.host._blocks:
            self.now = min(end, self.now + _POLL_S)
            self._deliver()
        return self._take()

    def _deliver(self) -> None:
        began = time.thread_time()
        self._run_proposer()
        while self._blocks and self._blocks[0][0] <= self.now:
            at, blocks = self._blocks.popleft()
            self.host.post_blocks([_posted(block, at) for block in blocks])
        self._world_s += time.thread_time() - began


def _posted(block: draft_pb2.Block, at: float) -> PostedBlock:
    tree = DraftTree.validated(
        block.base_len, block.token_ids, block.parents, 1 << 20, 512, (), block.confidences
    )
    return PostedBlock(block.session, tree, "p", block.draft_us, at, "draft_model")
