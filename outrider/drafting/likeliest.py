"""The likeliest tokens at a position, by the scorer's own scores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.draft_tree import DraftProbs
from outrider.engine.sampling.noise import gumbel_noise, token_noise
from outrider.engine.sampling.sample import SamplingBatch, process_logits, sample

_FEW = 256
MAX_DRAWN_FROM = 64
"""Most tokens that a draft for rejection is drawn from: their distribution crosses the wire."""


def top_candidates(
    logits: Tensor, batch: SamplingBatch | None, count: int
) -> tuple[Tensor, Tensor]:
    """Return the `count` tokens of highest score per row, best first, and their gaps to the best.

    logits [n, vocab]; `batch` None: all rows are greedy. Returns int64 [n, count] and float32
    [n, count]. The score is logit / temperature + noise, or the logit of a greedy row; the first
    token is the one that `sample` draws. Tokens that top_k, top_p or min_p cut have infinite gaps.
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


def cut_to_likeliest(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """Return `logits` [n, vocab] with -inf for cut tokens, without a device synchronisation.

    Only the `_FEW` likeliest tokens are sorted. Where they do not decide a cut by top_k or top_p,
    that cut is left out. Drafts are hints, so a token too many costs less than a sort.
    """
    if not (batch.any_sorted or batch.any_min_p):
        return logits
    temperature = torch.where(batch.temperature == 0.0, 1.0, batch.temperature)[:, None]
    scaled = logits.float() / temperature
    count = min(_FEW, logits.shape[-1])
    top = scaled.topk(count, dim=-1).values  # descending
    top_k = batch.top_k[:, None]
    kth = top.gather(1, top_k.clamp(1, count) - 1)
    kth = torch.where((top_k > 0) & (top_k <= count), kth, -torch.inf)
    weights = (scaled - top[:, :1]).exp().masked_fill(scaled < kth, 0.0)
    reached = (top - top[:, :1]).exp().masked_fill(top < kth, 0.0).cumsum(dim=-1)
    top_p = batch.top_p[:, None]
    num_kept = 1 + (reached < top_p * weights.sum(dim=-1, keepdim=True)).sum(dim=-1, keepdim=True)
    pth = top.gather(1, num_kept.clamp(max=count) - 1)
    pth = torch.where((top_p < 1.0) & (num_kept <= count), pth, -torch.inf)
    floor = top[:, :1] + batch.min_p[:, None].log()  # min_p = 0: -inf
    threshold = torch.maximum(torch.maximum(kth, pth), floor)
    return logits.masked_fill(scaled < threshold, -torch.inf)


@dataclass(frozen=True, slots=True)
class BiasedLogits:
    """Logits of m paths of each row, which differ by the token before: a sum not yet computed."""

    known: Tensor  # [n, 1, known]: without the bias
    ids: Tensor | None  # int64 [known]: the tokens that these are of; None: all
    bias: tuple[Tensor, Tensor, Tensor]
    """Table [any, rank], its rows int64 [n * m], and weight [known, rank]."""
    dense: Callable[[], Tensor]
    """Computes them: [n, m, vocab]."""


def dense(logits: Tensor | BiasedLogits) -> Tensor:
    """Return the logits [n, m, vocab] as a tensor."""
    return logits.dense() if isinstance(logits, BiasedLogits) else logits


def likeliest(
    logits: Tensor | BiasedLogits, batch: SamplingBatch | None, depth: int, count: int
) -> tuple[Tensor, Tensor]:
    """Return the `count` likeliest tokens of each path and their log probabilities, best first.

    Logits [n, m, vocab] of m paths per row become int64 and float32 [n, m, count]; fewer if the
    vocabulary is smaller. Scores are logits plus temperature times noise of the row's position plus
    `depth`; `batch` None: all rows are greedy. Tokens of score -inf have a probability of 0.
    """
    scores = dense(logits).float()
    if batch is not None:
        noise = gumbel_noise(batch.seed, batch.position + depth, scores.shape[-1]).float()
        scores = scores + (batch.temperature[:, None] * noise)[:, None]
    if count == 1:  # in fewer passes
        best, tokens = scores.max(dim=-1, keepdim=True)
        return tokens, (scores - best).exp_().sum(dim=-1, keepdim=True).log_().neg_()
    top = scores.topk(min(count, scores.shape[-1]), dim=-1)
    return top.indices, (top.values - scores.logsumexp(dim=-1, keepdim=True)).clamp(max=0.0)


def possible(token_ids: list[int], probs: list[float]) -> DraftProbs | None:
    """Return the distribution that a row's token was drawn from; None if no token was possible."""
    count = sum([prob > 0.0 for prob in probs])  # they come first
    return DraftProbs(tuple(token_ids[:count]), tuple(probs[:count])) if count else None


def draw_of_likeliest(logits: Tensor, batch: SamplingBatch) -> tuple[Tensor, Tensor, Tensor]:
    """Draw a token per row from the likeliest ones; return it with its distribution.

    logits [n, vocab]; no row is greedy. Returns tokens int64 [n], and the m <= `MAX_DRAWN_FROM`
    likeliest tokens int64 [n, m], the best first, with the probabilities float32 [n, m] that the
    draw is from, renormalised after top_k, top_p and min_p: zeros come last.
    """
    likeliest = process_logits(logits, batch).topk(min(MAX_DRAWN_FROM, logits.shape[-1]), dim=-1)
    probs = likeliest.values.softmax(dim=-1)
    scores = token_noise(batch.seed, batch.position, likeliest.indices)
    scores += probs.double().log()
    drawn = likeliest.indices.gather(1, scores.argmax(dim=-1, keepdim=True))[:, 0]
    return drawn, likeliest.indices, probs
