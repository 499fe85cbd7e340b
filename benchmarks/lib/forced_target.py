"""A target that emits a given text, so that tokens per round depend on the proposer alone.

With a real model underneath, rounds take the time that the model's forward takes.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor

from benchmarks.lib.loop import Loop, Outcome
from outrider.config import EngineConfig
from outrider.drafting.proposer import Proposer
from outrider.engine.batch import Model, PackedBatch
from outrider.engine.engine import Engine
from outrider.params import Advice, SamplingParams, SpeculationParams, StopParams, TokenIds
from outrider.policy.base import Policy
from outrider.types import Request

PAGE_SIZE = 16
GREEDY = SamplingParams(temperature=0.0)


class ForcedTarget:
    """A model whose likeliest token is the text's next one, for one request at a time."""

    def __init__(self, vocab_size: int, max_model_len: int, inner: Model | None = None) -> None:
        self.vocab_size = vocab_size
        self.page_size = PAGE_SIZE
        self.max_model_len = max_model_len
        self.num_pages = -(-max_model_len // PAGE_SIZE) + 1
        self.device = torch.device("cpu")
        self.text: Tensor = torch.empty(0, dtype=torch.int64)
        self._inner = inner

    def forward(self, batch: PackedBatch) -> Tensor:
        positions = batch.positions[batch.logits_index]
        if self._inner is None:
            logits = torch.zeros(len(positions), self.vocab_size)
        else:
            logits = self._inner.forward(batch).clone()
        logits.scatter_(1, self.text[positions + 1][:, None], 1e9)
        return logits

    def move_slots(self, source: Tensor, target: Tensor) -> None:
        if self._inner is not None:
            self._inner.move_slots(source, target)


def replay(
    target: ForcedTarget,
    policy: Policy,
    request: Request,
    output: TokenIds,
    proposer: Proposer | None,
    k: int,
) -> Outcome:
    """Decode `output` as the answer to `request`, drafting at most `k` tokens a round.

    The policy's clock is CPU time. Raises `AssertionError` if the text is another.
    """
    config = EngineConfig(
        page_size=PAGE_SIZE,
        num_pages=target.num_pages,
        max_model_len=target.max_model_len,
        enable_prefix_caching=False,
    )
    target.text = torch.tensor((*request.prompt_token_ids, *output, 0))
    engine = Engine(target, config, policy=policy, clock=time.process_time)
    outcome = Loop(engine).run(request, proposer, k, draft_first=True)
    assert outcome.token_ids == output, "another text"
    return outcome


def request_of(session: int, prompt: TokenIds, output: TokenIds, advice: Advice, k: int) -> Request:
    """Return a greedy request for as many tokens as `output` has."""
    speculation = SpeculationParams(num_speculative_tokens=k, advice=advice)
    stop = StopParams(max_tokens=len(output))
    return Request(session, prompt, GREEDY, stop, speculation)
