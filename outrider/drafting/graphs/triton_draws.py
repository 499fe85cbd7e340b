"""How a recorded loop draws on CUDA: kernels that store no noise, and cuts without waiting."""

from __future__ import annotations

from torch import Tensor

from outrider.drafting.likeliest import cut_to_likeliest
from outrider.engine.cuda.sampling import choose_top, noised, sample
from outrider.engine.sampling.coupled import SamplingBatch


class TritonDraws:
    """Implements `Draws`; safe to capture in a CUDA graph."""

    def choose(self, logits: Tensor, batch: SamplingBatch) -> Tensor:
        return sample(logits, batch)

    def candidates(self, logits: Tensor, batch: SamplingBatch, count: int) -> tuple[Tensor, Tensor]:
        logits = cut_to_likeliest(logits, batch)
        return choose_top(logits, batch.temperature, batch.seed, batch.position, count)

    def noised(self, logits: Tensor, batch: SamplingBatch, depth: int) -> Tensor:
        return noised(logits, batch.temperature, batch.seed, batch.position, depth)
