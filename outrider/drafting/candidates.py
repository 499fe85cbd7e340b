"""The likeliest tokens at a position, as the scorer will judge them: under the shared noise."""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.engine.sampling import SamplingBatch, gumbel_noise, process_logits, sample


def top_candidates(
    logits: Tensor, batch: SamplingBatch | None, count: int
) -> tuple[Tensor, Tensor]:
    """The `count` tokens of highest score per row, best first, and how far each is from the best.

    logits [n, vocab]; None: all rows greedy. Returns int64 [n, count] and float32 [n, count]. The
    score is logit / temperature + noise, or the logit of a greedy row; the first token is the one
    that `sample` draws. Tokens that top_k, top_p or min_p cut are infinitely far.
    """
    if batch is None:
        drawn, scores = logits.argmax(dim=-1), logits.double()
    else:
        drawn = sample(logits, batch)
        scores = gumbel_noise(batch.seed, batch.position, logits.shape[-1])
        scores += process_logits(logits, batch)
        scores = torch.where(batch.temperature[:, None] == 0.0, logits.double(), scores)
    best = scores.gather(1, drawn[:, None])
    scores = scores.scatter(1, drawn[:, None], torch.inf)  # first among its equals, too
    top = scores.topk(count, dim=-1)
    gaps = best - top.values
    gaps[:, 0] = 0.0
    return top.indices, gaps.float()
