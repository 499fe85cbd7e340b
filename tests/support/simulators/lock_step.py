"""Requests in vLLM's lock step on one simulated device, and their draft model on another.

Between both is the plug-in's host with its policy and hub, and a proposer's cycle. Times were
measured on two H200s with an 8B target and a 1B draft.
"""

from __future__ import annotations

import random
import time
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from outrider.draft_port import DraftOffer, PostedBlock
from outrider.drafting.drafters import Chain, DraftInput, FedRows, Forks
from outrider.engine.batch import RowSlice
from outrider.params import SamplingParams, SpeculationParams, StopParams
from outrider.types import Request, RequestStats, StepEvents
from outrider.v1 import draft_pb2
from outrider.vllm.draft_host import DraftHost, Listener
from outrider.vllm.waiting import LockstepPolicy
from tests.support.simulators.simulation import Clock, Net, Network, drafting_with
from tests.support.simulators.two_devices import DRAFT_MS, DRAFT_ROWS

K, PROMPT, ANSWER, CONTEXT, VOCAB = 4, 64, 256, 1024, 1 << 20
_BY_RANK = (0.92, 0.96, 0.976, 0.984)  # of draft tokens: the truth is the first, or so far below
_ROWS, _PLAIN_MS, _VERIFYING_MS = (1, 8, 32), (4.5, 4.9, 6.4), (5.2, 5.7, 9.0)
_HOST_S = 2e-3  # between steps
_WAY_S = 1e-3  # from a commit to the proposer, and from its draft to the engine
_SESSION_S, _TREE_S = 30e-6, 40e-6  # of the proposer's Python: a commit and its plan, and a tree


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

    page_size, num_pages, max_model_len, vocab_size = 16, 16_384, CONTEXT, VOCAB
    max_tokens = 1 << 30

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def _spend(self, rows: int, forwards: int) -> None:
        self._clock.now += 1e-3 * forwards * float(np.interp(rows, DRAFT_ROWS, DRAFT_MS))

    def feed(self, slices: Sequence[RowSlice]) -> bool:
        self._spend(len(slices), 2)
        return True

    def draft(self, rows: Sequence[DraftInput]) -> list[Chain]:
        self._spend(len(rows), rows[0].wanted)
        return [
            ([self._candidates(row.slice, row.end + i)[0][0] for i in range(row.wanted)], b"")
            for row in rows
        ]

    def forks(self, rows: FedRows, num_tokens: int, fanout: int, *_copies: object) -> Forks:
        slices = rows.slices
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


class _Host(DraftHost):
    """Waits for blocks in simulated time."""

    world: LockStep

    def take(
        self, timeout_s: float = 0.0
    ) -> tuple[Iterable[tuple[int, DraftOffer]], dict[int, list[PostedBlock]]]:
        self.world.go_on(timeout_s, until_blocks=True)
        return super().take()

    def post_blocks(self, blocks: Iterable[PostedBlock]) -> None:
        super().post_blocks([replace(block, arrived_at=self.world.now) for block in blocks])


class LockStep(Network, Listener):
    """`rows` requests in flight, each followed by the next."""

    def __init__(self, rows: int) -> None:
        self._num_rows = rows
        self.policy = LockstepPolicy(K)
        self.host = _Host(
            K, CONTEXT, 64, policy=self.policy, max_graph_rows=64, clock=lambda: self.now
        )
        self.host.world = self.host.listener = self
        super().__init__(self.host, random.Random(1), K, vocab_size=VOCAB, max_model_len=CONTEXT)
        clock = Clock()
        limits = {"max_sessions": 64, "prefill_budget": 1 << 16}
        method = drafting_with(_Draft(clock), clock, own_loops=True, **limits)
        self.add((method, clock), Net(_WAY_S), own_device=True)
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
            self._run_step()
        return self.tokens / (self.now - began)

    def go_on(self, seconds: float, *, until_blocks: bool = False) -> None:
        """Let time pass, and the proposer draft meanwhile."""
        began, end = time.thread_time(), self.now + seconds
        while self._events[:1] and self._events[0][0] <= end:
            if until_blocks and self.host._blocks:
                break
            self.step()
        else:
            self.now = end
        self._world_s += time.thread_time() - began

    def _run_step(self) -> None:
        opened = [self._open() for _ in range(self._num_rows - len(self._texts))]
        names, drafts = list(self._texts), self._drafts
        verified = {name: draft for name, draft in drafts.items() if draft}
        self.go_on(_HOST_S)
        scheduled = {name: 1 + len(drafts.get(name, ())) for name in names}
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

    # The host's listener, and the proposer's times.

    def opened(self, request: Request, traceparent: str) -> None:
        self._tell(self.hub.submit, request, traceparent)

    def stepped(self, events: StepEvents) -> None:
        began = time.thread_time()
        self._tell(self.hub.on_events, replace(events, counts=None))
        self._world_s += time.thread_time() - began

    def _python_s(self, num_commits: int = 0, blocks: Sequence[draft_pb2.Block] = ()) -> float:
        return _SESSION_S * num_commits + _TREE_S * len(blocks)
