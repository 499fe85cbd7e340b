"""Texts that copy long stretches of their prompts now and then, with a proposer that looks them up.

Between two copies nothing is accepted, and K falls to 0. The rows must come back to drafts.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
from numpy.typing import NDArray

from outrider.config import EngineConfig
from outrider.drafting.copying.suffix import SuffixProposer
from outrider.engine.step import Step
from outrider.params import SamplingParams, SpeculationParams, StopParams
from outrider.policy.adaptive import AdaptivePolicy
from outrider.types import Request
from tests.support.simulators.devices import Numbers, ShortSighted, TokensAt
from tests.support.simulators.methods import Clock, Net
from tests.support.simulators.simulation import World

VOCAB, PROMPT, ANSWER, ROWS, K, PAGES = 2048, 400, 1000, 8, 24, 4096
STEP_TOKENS = (1, 8, 40, 160, 320, 640)
STEP_S = (0.0046, 0.0048, 0.0052, 0.0063, 0.0097, 0.016)  # of an 8B target on an H200
CONFIG = EngineConfig(
    num_pages=PAGES,
    max_model_len=2048,
    max_num_batched_tokens=8192,
    num_speculative_tokens=K,
    enable_prefix_caching=False,
)


def step_s(step: Step) -> float:
    return float(np.interp(step.num_tokens, STEP_TOKENS, STEP_S))


class Scripted(ShortSighted):
    """Continues the text of a request as its script says; the first token names it."""

    def __init__(self) -> None:
        super().__init__(VOCAB, 16, PAGES, 2048)
        self.scripts: list[list[int]] = []

    def logits_at(self, positions: Numbers, tokens_at: TokensAt) -> NDArray[np.float32]:
        first_tokens = tokens_at(0 * positions)
        places = np.minimum(positions + 1, PROMPT + ANSWER - 1)
        scripts = [self.scripts[name] for name in first_tokens]
        following = [script[at] for script, at in zip(scripts, places, strict=True)]
        return 10.0 * np.eye(VOCAB, dtype=np.float32)[following]


class LongCopies(World):
    """Requests follow one another."""

    answer_len = ANSWER

    def __init__(self, *, speculate: bool) -> None:
        self._target, self._speculation = Scripted(), SpeculationParams(enabled=speculate)
        super().__init__(AdaptivePolicy(K), CONFIG, step_s, random.Random(1), self._target)
        method = SuffixProposer(max_branches=0, max_draft_tokens=K), Clock()
        self.add(method, Net(0.0003), own_device=True)
        self.set_rows(ROWS, apart=True)

    def _request(self, max_tokens: int) -> Request:
        name, rng = len(self.requests), self.rng
        text = [name, *rng.choices(range(200, VOCAB), k=PROMPT - 1)]
        while len(text) < PROMPT + ANSWER:
            text += rng.choices(range(200, VOCAB), k=rng.randint(40, 120))
            begin, size = rng.randrange(1, 200), rng.randint(60, 200)
            text += text[begin : begin + size]
        self._target.scripts.append(text)
        sampling, stop = SamplingParams(temperature=0.0), StopParams(max_tokens)
        return Request(name + 1, tuple(text[:PROMPT]), sampling, stop, self._speculation)


@pytest.mark.timeout(120)
def test_rows_between_long_copies_come_back_to_drafts() -> None:
    rates = [LongCopies(speculate=speculate).rate(3.0, after=1.0) for speculate in (False, True)]
    assert rates[1] > 1.5 * rates[0]
