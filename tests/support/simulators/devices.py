"""Closed loops of requests on simulated devices: a target's steps and a draft's forwards.

All times were measured with an 8B target and a 1B draft on two H200s.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.config import EngineConfig
from outrider.draft_port import DraftOffer
from outrider.drafting.proposer import SessionStart
from outrider.engine.batch import PackedBatch
from outrider.engine.step import Step
from outrider.params import SamplingParams, SpeculationParams, StopParams
from outrider.policy.adaptive import AdaptivePolicy
from outrider.policy.base import Policy
from outrider.types import Request
from scorer_service.drafting.in_process import InProcessProposer
from tests.support.models.hash_model import MASK, HashModel
from tests.support.simulators.methods import VOCAB, DraftHash, Method, Net, drafting_with
from tests.support.simulators.simulation import Player, World

PROMPT, ANSWER, K = 270, 256, 4
# By the first token, which is the temperature: 0.73 and 0.38 of the draft tokens are accepted.
AGREEMENT = np.array([0.025, 0.40], np.float32)
_ROWS = (1, 8, 32, 64, 128, 256)  # the last two are reckoned from the device's FLOP/s
_PLAIN_MS = (4.02, 4.39, 4.98, 5.6, 7.2, 10.5)
_VERIFYING_MS = (4.29, 4.87, 6.08, 8.8, 16.0, 30.0)
HOST_S, _BLOCK_S = 0.35e-3, 25e-6  # of the scorer's Python: a step, and a block
DRAFT_ROWS = (1, 8, 16, 32, 128, 512, 1024)
DRAFT_MS = (0.61, 0.74, 0.84, 1.0, 1.67, 3.78, 7.5)
_PROMPT_S, _DRAFT_PROMPT_S = 0.015e-3, 0.0045e-3  # a token
NET = Net(0.4e-3, part_s=12e-6, chain_s=15e-6, tree_s=30e-6, node_s=1e-6)

Work = dict[Callable[[], None], float]  # what ends it, and the seconds it would still take alone
Numbers = NDArray[np.int64]
TokensAt = Callable[[Numbers], Numbers]  # at places of texts


class ShortSighted(HashModel):
    """Says what follows from three tokens, the prompt and the position: fast with long texts."""

    def forward(self, batch: PackedBatch) -> torch.Tensor:
        self._slots[batch.slot_mapping.numpy()] = batch.input_ids.numpy()
        index, pages = batch.logits_index, batch.block_table.numpy()
        rows = torch.searchsorted(batch.cu_seqlens_q[1:].long(), index, right=True).numpy()

        def tokens_at(places: Numbers) -> Numbers:
            slots = pages[rows, places // self.page_size] * self.page_size
            return self._slots[slots + places % self.page_size]

        return torch.from_numpy(self.logits_at(batch.positions[index].numpy(), tokens_at))

    def logits_at(self, positions: Numbers, tokens_at: TokensAt) -> NDArray[np.float32]:
        """Logits after `positions` [n] of n texts, of which `tokens_at` says the tokens."""
        state = positions.astype(np.uint64)
        for places in (np.array(5), positions, positions - 1, positions - 2):
            tokens = tokens_at(np.maximum(0, places)).astype(np.uint64)
            state = ((state ^ (tokens + 1)) * 0x01000193 + 0x9E3779B9) & MASK
            state ^= state >> 15
        return self._logits(state)


class _Draft(DraftHash, ShortSighted):
    def logits_at(self, positions: Numbers, tokens_at: TokensAt) -> NDArray[np.float32]:
        self._eps = AGREEMENT[tokens_at(0 * positions), None]
        return super().logits_at(positions, tokens_at)


def _draft_s(rows: int, tokens: int) -> float:
    prompts_s = _DRAFT_PROMPT_S * tokens * (tokens > rows + 64)
    return 1e-3 * float(np.interp(rows, DRAFT_ROWS, DRAFT_MS)) + prompts_s


class TwoDevices(World):
    """`rows` requests in flight, each followed by the next, of the `temperature` that is set then.

    `own_device`: the proposer says that it has one. `ragged`: a step takes what its tokens take,
    while else all rows take as much as the one with the longest draft.
    """

    answer_len, net = ANSWER, NET
    max_num_batched_tokens = prefill_budget = 1024  # of a step, and of prompts in a draft

    def __init__(
        self,
        rows: int,
        temperature: float,
        *,
        speculate: bool = True,
        max_branches: int = 16,
        own_device: bool = True,
        seed: int = 1,
        ragged: bool = False,
        policy: Policy | None = None,
    ) -> None:
        pages, most_rows, budget = 16_384, max(128, rows), self.max_num_batched_tokens
        config = EngineConfig(16, pages, most_rows, budget, 1024, enable_prefix_caching=False)
        target, rng = ShortSighted(VOCAB, 16, pages, 1024), random.Random(seed)
        step_s = partial(_step_s, ragged=ragged)
        super().__init__(policy or AdaptivePolicy(K), config, step_s, rng, target)
        self.policy.measured.steps.padded = not ragged
        self.engine.check_invariants = lambda: None  # type: ignore[method-assign]
        limits = {"prefill_budget": self.prefill_budget, "max_sessions": 2 * most_rows}
        draft = _Draft(0.0, _draft_s, 16, pages, 1024)
        method = drafting_with(draft, max_branches=max_branches, **limits)
        self.add(method, self.net, own_device=own_device)
        self.temperature, self._seed = temperature, seed
        self._speculation = SpeculationParams(enabled=speculate)
        self.set_rows(rows, apart=True)

    def _request(self, max_tokens: int) -> Request:
        i = len(self.requests)  # their ids begin at 1
        rng = random.Random(self._seed * 100_003 + i)
        prompt = (int(self.temperature), *[rng.randrange(VOCAB) for _ in range(PROMPT)][1:])
        sampling = SamplingParams(temperature=self.temperature, seed=i)
        return Request(i + 1, prompt, sampling, StopParams(max_tokens), self._speculation)


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


class OneDevice(TwoDevices):
    """Drafts on demand on the target's device. The share `slow` of drafts takes `slow_s` longer.

    While a step and a draft are both under way each goes on at half its speed; so two processes
    share a GPU. Their Python is reckoned with what the device does.
    """

    def __init__(self, *load: Any, slow: float = 0.0, slow_s: float = 0.0, **options: Any) -> None:
        self._left_s: Work = {}
        self._changed_at = 0.0
        self.net = replace(NET, slow_chance=slow, slow_s=slow_s)
        super().__init__(*load, max_branches=0, own_device=False, **options)

    def _takes(self, seconds: float, then: Callable[[], None]) -> None:
        self._change({then: seconds})

    def _change(self, begun: Work, ended: Callable[[], None] | None = None) -> None:
        """Let all that is under way go on until now; then something begins or ends."""
        passed_s, self._changed_at = self.now - self._changed_at, self.now
        left_s = {work: s - passed_s / len(self._left_s) for work, s in self._left_s.items()}
        self._left_s = left_s = {work: s for work, s in left_s.items() if work != ended} | begun
        if left_s:
            work = min(left_s, key=left_s.__getitem__)
            self.at(self.now + left_s[work] * len(left_s), partial(self._end, work, left_s))

    def _end(self, work: Callable[[], None], left_s: Work) -> None:
        if left_s is self._left_s:  # else it has become later since
            self._change({}, work)
            work()


class InProcess(TwoDevices):
    """The scorer's own process drafts, by the real proposer, between steps on the target's device.

    Steps take what their tokens take. Without drafts the next step is launched ahead.
    """

    max_num_batched_tokens, prefill_budget = 2048, 4096

    def __init__(self, *load: Any, **options: Any) -> None:
        super().__init__(*load, max_branches=0, ragged=True, **options)
        step_s = self.step_s
        self.step_s = lambda step: step_s(step) - self._hidden_s

    def add(self, method: Method, net: Net, *, own_device: bool = False) -> Player:
        self._here = InProcessProposer(lambda: (method[0], ""), "here", method[1])
        self._here.build()
        self._here.listen(self)
        for n in (1, 8, 16, 32, 64, 128, 256):  # as a start measures them
            for k in range(K + 1):
                self.policy.measured.steps.observe_step(n, n * (1 + k), verify_s(n, k))
        return super().add(method, net, own_device=own_device)

    def _attach(self, player: Player) -> None:
        """It needs no stream."""

    def begin(self, request: Request) -> None:
        super().begin(request)
        session, asked, most = request.session_id, self.drafting, PROMPT + request.stop.max_tokens
        start = SessionStart((), request.sampling, K * asked, max_len=most)
        if self._speculation.enabled:
            self.set_drafting(session, DraftOffer("here", K, colocated=True, requested=asked))
            self._command(partial(self._here.open, self.engine, session, 1, start, PROMPT))

    def first_draft(self, *_: int) -> None:
        """It was told; `lost` and `failed` never are."""

    def _carry_out(self) -> None:
        super()._carry_out()
        (clock := self.players[0].clock).now = self.now
        self._here.draft_between_steps(self.engine)
        self._hidden_s = HOST_S * (self.now == clock.now)  # by the step before
        self.now = clock.now

    def _finalize(self, wake_at: float) -> None:
        super()._finalize(self.now + 1e-5 if self._here.busy else wake_at)
