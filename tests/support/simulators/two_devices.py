"""A closed loop of requests on two simulated devices: a target's steps beside a draft's forwards.

Times were measured with an 8B target and a 1B draft on two H200s: a
step by its rows and draft tokens, a forward of the draft by its rows, prompts, Python, and the way
between both.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.config import EngineConfig
from outrider.engine.batch import PackedBatch
from outrider.engine.step import Step
from outrider.params import SamplingParams, SpeculationParams, StopParams
from outrider.policy.adaptive import AdaptivePolicy
from outrider.policy.base import Policy
from outrider.types import Request
from outrider.v1 import draft_pb2
from tests.support.models.hash_model import MASK, HashModel
from tests.support.simulators.simulation import (
    VOCAB,
    Clock,
    Net,
    Player,
    World,
    drafting_with,
)

PROMPT, ANSWER, K = 270, 256, 4
TEMPERATURES = (0.0, 1.0)  # of which a prompt's first token is the index
AGREEMENT = np.array([0.025, 0.40], np.float32)  # 0.73 and 0.38 of the draft tokens are accepted
_ROWS = (1, 8, 32, 64, 128, 256)  # the last two are reckoned from the device's FLOP/s
_PLAIN_MS = (4.02, 4.39, 4.98, 5.6, 7.2, 10.5)
_VERIFYING_MS = (4.29, 4.87, 6.08, 8.8, 16.0, 30.0)
HOST_S, _BLOCK_S = 0.35e-3, 25e-6  # of the scorer's Python: a step, and a block
DRAFT_ROWS = (1, 8, 16, 32, 128, 512, 1024)
DRAFT_MS = (0.61, 0.74, 0.84, 1.0, 1.67, 3.78, 7.5)
_PROMPT_S, _DRAFT_PROMPT_S = 0.015e-3, 0.0045e-3  # a token
_WAY_S, _MESSAGE_S = 0.4e-3, 12e-6  # one way, and by session
_DRAFT_S, _BRANCHES_S, _NODE_S = 15e-6, 30e-6, 1e-6  # of the proposer's Python


class ShortSighted(HashModel):
    """Says what follows from three tokens, the prompt and the position: fast with long texts."""

    def forward(self, batch: PackedBatch) -> Tensor:
        self._slots[batch.slot_mapping.numpy()] = batch.input_ids.numpy()
        index, pages = batch.logits_index, batch.block_table.numpy()
        rows = torch.searchsorted(batch.cu_seqlens_q[1:].long(), index, right=True).numpy()
        positions = batch.positions[index].numpy()

        def tokens_at(places: NDArray[np.int64]) -> NDArray[np.int64]:
            slots = pages[rows, places // self.page_size] * self.page_size
            tokens: NDArray[np.int64] = self._slots[slots + places % self.page_size]
            return tokens

        state = positions.astype(np.uint64)
        for places in (np.array(5), positions, positions - 1, positions - 2):
            tokens = tokens_at(np.maximum(0, places)).astype(np.uint64)
            state = (state ^ (tokens + 1)) * np.uint64(0x01000193)
            state = (state + np.uint64(0x9E3779B9)) & MASK
            state ^= state >> np.uint64(15)
        return torch.from_numpy(self._answers(state, tokens_at(0 * positions), positions))

    def _answers(self, states: NDArray[np.uint64], *_: NDArray[np.int64]) -> NDArray[np.float32]:
        """Logits by the states of texts, their first tokens and their positions."""
        return self._logits(states)


class _Draft(ShortSighted):
    def __init__(self, clock: Clock, num_pages: int) -> None:
        super().__init__(VOCAB, 16, num_pages, 1024)
        self._clock = clock

    def forward(self, batch: PackedBatch) -> Tensor:
        rows, tokens = len(batch.query_lens), len(batch.input_ids)
        self._clock.now += 1e-3 * float(np.interp(rows, DRAFT_ROWS, DRAFT_MS))
        if tokens > rows + 64:  # with prompts
            self._clock.now += _DRAFT_PROMPT_S * tokens
        return super().forward(batch)

    def _answers(
        self,
        states: NDArray[np.uint64],
        first_tokens: NDArray[np.int64],
        *_: NDArray[np.int64],
    ) -> NDArray[np.float32]:
        eps = AGREEMENT[first_tokens, None]
        return (1 - eps) * self._logits(states) + eps * self._logits(states ^ np.uint64(0x5BD1E995))


class TwoDevices(World):
    """`rows` requests in flight, each followed by the next. The `temperature` of those to come
    may be set anew.

    `own_device`: the proposer says that it has one. `ragged`: a step takes what its tokens take,
    while else all rows take as much as the one with the longest draft.
    """

    answer_len = ANSWER
    max_num_batched_tokens = prefill_budget = 1024  # of a step, and of prompts in a draft

    def __init__(
        self,
        rows: int,
        temperature: float,
        *,
        speculate: bool = True,
        max_branches: int = 16,
        own_device: bool = True,
        policy: Policy | None = None,
        seed: int = 1,
        ragged: bool = False,
    ) -> None:
        pages, most_rows, budget = 16_384, max(128, rows), self.max_num_batched_tokens
        config = EngineConfig(
            num_pages=pages,
            max_model_len=1024,
            max_num_seqs=most_rows,
            max_num_batched_tokens=budget,
            enable_prefix_caching=False,
        )
        policy = policy or AdaptivePolicy(K)
        policy.measured.steps.padded = not ragged
        target, rng = ShortSighted(VOCAB, 16, pages, 1024), random.Random(seed)
        super().__init__(policy, config, lambda _: self._seconds(), rng, target)
        self.engine.check_invariants = lambda: None  # type: ignore[method-assign]
        clock = Clock()
        method = drafting_with(
            _Draft(clock, pages),
            clock,
            max_branches=max_branches,
            prefill_budget=self.prefill_budget,
            max_sessions=2 * most_rows,
        )
        self.add((method, clock), Net(_WAY_S), own_device=own_device)
        self.temperature = temperature
        self._speculate, self._seed, self._ragged = speculate, seed, ragged
        self._step_now = 0.005
        self.set_rows(rows, apart=True)

    def _request(self, max_tokens: int) -> Request:
        i = len(self.requests)  # their ids begin at 1
        rng = random.Random(self._seed * 100_003 + i)
        kind = TEMPERATURES.index(self.temperature)
        prompt = (kind, *[rng.randrange(VOCAB) for _ in range(PROMPT)][1:])
        sampling = SamplingParams(temperature=self.temperature, seed=i)
        speculation = SpeculationParams(enabled=self._speculate)
        return Request(i + 1, prompt, sampling, StopParams(max_tokens=max_tokens), speculation)

    def _seconds(self) -> float:
        if (flight := self.engine._in_flight) is not None:
            self._step_now = _step_s(flight.step, ragged=self._ragged)
        return self._step_now

    def _way_s(self, player: Player, num_parts: int) -> float:  # noqa: ARG002
        return _WAY_S + _MESSAGE_S * num_parts

    def _python_s(self, num_commits: int = 0, blocks: Sequence[draft_pb2.Block] = ()) -> float:  # noqa: ARG002
        nodes = [len(block.parents) for block in blocks]  # 0 of a chain
        trees = len(nodes) - nodes.count(0)
        return _DRAFT_S * nodes.count(0) + _BRANCHES_S * trees + _NODE_S * sum(nodes)


def _step_s(step: Step, *, ragged: bool) -> float:
    rows = step.rows
    drafts = [len(row.draft) for row in rows]
    k = sum(drafts) / len(rows) if ragged else max(drafts)
    prompts = sum([len(row.slice.token_ids) - len(row.draft) - 1 for row in rows])
    blocks = sum([bool(row.draft) for row in rows])
    return verify_s(len(rows), k) + HOST_S + _PROMPT_S * prompts + _BLOCK_S * blocks


def verify_s(rows: int, k: float) -> float:
    """Return the device's seconds for a step of rows with `k` draft tokens each, in the mean."""
    plain, verifying = (np.interp(rows, _ROWS, ms) for ms in (_PLAIN_MS, _VERIFYING_MS))
    return float(1e-3 * (plain + (verifying - plain) * k / K))
