"""How a draft loop draws."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from outrider.drafting.likeliest import noised, top_candidates
from outrider.engine.sampling.coupled import SamplingBatch, sample


class Draws(Protocol):
    """How a loop draws tokens from logits [n, vocab] of any dtype."""

    def choose(self, logits: Tensor, batch: SamplingBatch) -> Tensor:
        """int64 [n], as `sample`."""
        ...

    def candidates(self, logits: Tensor, batch: SamplingBatch, count: int) -> tuple[Tensor, Tensor]:
        """int64 [n, count] and float32 [n, count], as `top_candidates`."""
        ...

    def noised(self, logits: Tensor, batch: SamplingBatch, depth: int) -> Tensor:
        """float32 [n, m, vocab] from as many, as `candidates.noised`."""
        ...


class TorchDraws:
    """`Draws` in torch's operations. With cuts they wait for the device: not to be recorded."""

    def choose(self, logits: Tensor, batch: SamplingBatch) -> Tensor:
        return sample(logits, batch)

    def candidates(self, logits: Tensor, batch: SamplingBatch, count: int) -> tuple[Tensor, Tensor]:
        return top_candidates(logits, batch, count)

    def noised(self, logits: Tensor, batch: SamplingBatch, depth: int) -> Tensor:
        return noised(logits, batch, depth)
