"""Drafting methods on a simulated clock: real code over models and nets with made-up times."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from outrider.drafting.copying.deterministic import DeterministicProposer
from outrider.drafting.copying.ngram import NgramProposer
from outrider.drafting.copying.suffix import SuffixProposer
from outrider.drafting.draft_model.loops import EagerForks
from outrider.drafting.draft_model.proposer import DraftModelProposer
from outrider.drafting.drafters import ForkBatch, Forks
from outrider.drafting.proposer import Proposer, ProposerLimits
from outrider.engine.batch import PackedBatch
from tests.support.models.hash_model import HashModel

VOCAB = 32


@dataclass
class Clock:
    """Holds the time that a drafting thread takes."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(frozen=True)
class Net:
    """The way between a scorer and a proposer, one way, and the proposer's Python. Seconds."""

    delay_s: float = 0.0001
    part_s: float = 0.0  # for each session of a message
    jitter_s: float = 0.0
    stall_chance: float = 0.0  # per message
    stall_s: float = 0.0
    break_chance: float = 0.0  # per message: the stream breaks
    repeat_chance: float = 0.0  # per block
    reorder_chance: float = 0.0  # per block: it comes later than those after it
    chain_s: float = 0.0
    tree_s: float = 0.0
    node_s: float = 0.0  # of a tree
    slow_chance: float = 0.0  # per message of blocks: it takes `slow_s` longer
    slow_s: float = 0.0


class DraftHash(HashModel):
    """Agrees with the target the more, the smaller `eps` is. So many rows take `forward_s`."""

    def __init__(self, eps: Any, forward_s: Callable[[int, int], float], *sizes: int) -> None:
        super().__init__(VOCAB, *sizes)
        self.clock, self._eps, self._forward_s = Clock(), eps, forward_s
        self.last_s = self.busy_until = 0.0  # of the last forward, and of the device

    def forward(self, batch: PackedBatch) -> Tensor:
        self.last_s = self._forward_s(len(batch.query_lens), len(batch.input_ids))
        self.clock.now = max(self.clock.now, self.busy_until) + self.last_s
        return super().forward(batch)

    def _logits(self, states):  # type: ignore[no-untyped-def]
        other = super()._logits(states ^ np.uint64(0x5BD1E995))
        return (1 - self._eps) * super()._logits(states) + self._eps * other


Method = tuple[Proposer, Clock]


def draft_model(
    eps: float = 0.2, forward_s: float = 0.0006, *sizes: int, max_branches: int = 8
) -> Method:
    model = DraftHash(eps, lambda *_: forward_s, 4, *sizes or (4096, 4096))
    return drafting_with(model, max_branches=max_branches)


class _DeviceForks(EagerForks):
    """Lets the forward behind a loop run while the host goes on, as captured loops do."""

    _model: DraftHash

    def forks(self, *args: Any, beyond: bool = False, **options: Any) -> ForkBatch:
        batch, device = super().forks(*args, beyond=beyond, **options), self._model
        if not beyond:
            return batch
        device.busy_until = until = device.clock.now
        device.clock.now -= device.last_s

        def wait() -> Forks:
            device.clock.now = max(device.clock.now, until)
            return batch.beyond

        return ForkBatch(lambda: batch.forks, wait)


def drafting_with(model: DraftHash, **limits: int) -> Method:
    parts = {"limits": ProposerLimits(**limits), "clock": model.clock}
    forks = _DeviceForks(model)
    return DraftModelProposer(model, name="draft", fork_drafter=forks, **parts), model.clock


COPYING: dict[str, Callable[..., Proposer]] = {
    "ngram": partial(NgramProposer, prompt_lookup_min=1),
    **{"suffix": SuffixProposer, "deterministic": DeterministicProposer},
}


def copying(method: str, max_branches: int = 8) -> Method:
    return COPYING[method](max_branches=max_branches), Clock()
