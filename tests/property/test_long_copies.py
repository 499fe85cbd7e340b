"""Texts that copy long stretches of their prompts now and then, with a proposer that looks them up.

Between two copies nothing is accepted, and K falls to 0. The rows must come back to drafts.
"""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch
from torch import Tensor

from outrider.config import EngineConfig
from outrider.drafting.copying.suffix import SuffixProposer
from outrider.engine.batch import PackedBatch
from outrider.params import SamplingParams, SpeculationParams, StopParams
from outrider.policy.adaptive import AdaptivePolicy
from outrider.types import Request
from tests.support.models.hash_model import HashModel
from tests.support.simulators.simulation import Clock, Net, World

VOCAB, PROMPT, ANSWER, ROWS, K, PAGES = 2048, 400, 1000, 8, 24, 4096
STEP_TOKENS = (1, 8, 40, 160, 320, 640)
STEP_S = (0.0046, 0.0048, 0.0052, 0.0063, 0.0097, 0.016)  # of an 8B target on an H200


class Scripted(HashModel):
    """Continues the text of a request as its script says; the first token names it."""

    def __init__(self) -> None:
        super().__init__(VOCAB, 16, PAGES, 2048)
        self.scripts: dict[int, list[int]] = {}

    def forward(self, batch: PackedBatch) -> Tensor:
        self._slots[batch.slot_mapping.numpy()] = batch.input_ids.numpy()
        rows = torch.searchsorted(batch.cu_seqlens_q[1:].long(), batch.logits_index, right=True)
        first = self._slots[batch.block_table.numpy()[rows.numpy(), 0] * self.page_size]
        positions = batch.positions[batch.logits_index].tolist()
        logits = torch.zeros(len(positions), VOCAB)
        for i, (name, position) in enumerate(zip(first.tolist(), positions, strict=True)):
            logits[i, self.scripts[name][min(position + 1, PROMPT + ANSWER - 1)]] = 10.0
        return logits


def rate(*, speculate: bool) -> float:
    """Tokens/s of requests that follow one another, when they have run for a second."""
    model, rng, names = Scripted(), random.Random(1), itertools.count(1)
    config = EngineConfig(
        num_pages=PAGES,
        max_model_len=2048,
        max_num_batched_tokens=8192,
        num_speculative_tokens=K,
        enable_prefix_caching=False,
    )
    world = World(
        AdaptivePolicy(K), config, lambda n: float(np.interp(n, STEP_TOKENS, STEP_S)), rng, model
    )
    method = SuffixProposer(max_branches=0, max_draft_tokens=K), Clock()
    world.add(method, Net(0.0003), own_device=True)

    def request() -> Request:
        name = next(names)
        text = [name, *rng.choices(range(200, VOCAB), k=PROMPT - 1)]
        while len(text) < PROMPT + ANSWER:
            text += rng.choices(range(200, VOCAB), k=rng.randint(40, 120))
            begin, size = rng.randrange(1, 200), rng.randint(60, 200)
            text += text[begin : begin + size]
        model.scripts[name] = text
        stop = StopParams(max_tokens=ANSWER * min(name, ROWS) // ROWS)
        speculation = SpeculationParams(enabled=speculate)
        return Request(
            name, tuple(text[:PROMPT]), SamplingParams(temperature=0.0), stop, speculation
        )

    world.next_request = request
    for _ in range(ROWS):
        world.submit(request())
    world.run(until=1.0)
    before = sum(map(len, world.committed.values()))
    world.run(until=4.0)
    return (sum(map(len, world.committed.values())) - before) / 3.0


@pytest.mark.timeout(120)
def test_rows_between_long_copies_come_back_to_drafts() -> None:
    assert rate(speculate=True) > 1.5 * rate(speculate=False)
