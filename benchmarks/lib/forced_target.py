"""A target that says what it is told to, and the engine's loop with a proposer beside it.

So a proposer can be measured on texts that no model of this repository would write: tokens per
round depend on the proposer alone, and with a real model underneath (`ForcedTarget.inner`) rounds
take what they take.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.config import EngineConfig
from outrider.drafting.proposer import Proposer, SessionStart
from outrider.engine.batch import Model, PackedBatch
from outrider.engine.engine import Engine
from outrider.engine.policy.base import Policy
from outrider.params import Advice, SamplingParams, SpeculationParams, StopParams, TokenIds
from outrider.types import Request, RequestStats

PAGE_SIZE = 16
GREEDY = SamplingParams(temperature=0.0)


class ForcedTarget:
    """At each position the text's next token is the likeliest; one request at a time."""

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


@dataclass(frozen=True)
class Replay:
    """One request's account. Seconds from its first token to its last, of CPU time."""

    output_tokens: int
    stats: RequestStats
    seconds: float


def replay(
    target: ForcedTarget,
    policy: Policy,
    session: int,
    prompt: TokenIds,
    output: TokenIds,
    proposer: Proposer | None,
    advice: Advice,
    k: int,
) -> Replay:
    """Decode `output` after `prompt`, drafting at most `k` tokens a round, on demand.

    Nothing runs beside anything else: drafting and steps take turns, and the policy's clock is CPU
    time, so that a busy machine disturbs little. Raises `AssertionError` if the text is another.
    """
    clock: Callable[[], float] = time.process_time
    config = EngineConfig(
        page_size=PAGE_SIZE,
        num_pages=target.num_pages,
        max_model_len=target.max_model_len,
        enable_prefix_caching=False,
    )
    target.text = torch.tensor((*prompt, *output, 0))
    engine = Engine(target, config, policy=policy, clock=clock)
    speculation = SpeculationParams(num_speculative_tokens=k, advice=advice)
    stop = StopParams(max_tokens=len(output))
    engine.submit(Request(session, prompt, GREEDY, stop, speculation))
    text: list[int] = []
    if proposer is not None:
        engine.set_drafting(session, "proposer", k)
        start = SessionStart(prompt, GREEDY, k, len(prompt) + len(output), advice=advice)
        proposer.open(session, start)
    began = clock()
    wanting = proposer is not None
    while True:
        if wanting and proposer is not None:
            for _, tree in proposer.draft([session]).drafts:
                engine.post_block(session, tree, "proposer", 1, method=proposer.traits.method)
            wanting = False
        events = engine.step()
        for commit in events.commits if events else ():
            if not text:
                began = clock()
            text += commit.token_ids
            if commit.finish_reason is not None:
                taken = clock() - began
                if proposer is not None:
                    proposer.close(session)
                assert tuple(text) == output, "another text"
                assert commit.stats is not None
                return Replay(len(output), commit.stats, taken)
            if proposer is not None:
                proposer.commit(session, commit.base_len, commit.token_ids, commit.num_draft_tokens)
                wanting = commit.num_draft_tokens > 0
