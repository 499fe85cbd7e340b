"""Draw tokens from logits: temperature, top_k, top_p and min_p, then coupled sampling.

A drawn token is a function of logits, seed and position only:

    y = argmax(processed_logits / T + g(seed, position, token))

with g standard Gumbel noise (noise.py). The Gumbel-max trick makes y an exact draw from
softmax(processed_logits / T). Because a proposer can add the same g to its own logits, the two
agree with probability at least (1 - TV) / (1 + TV) (Daliri et al., arXiv 2408.07978), and a draft
can never change the text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from outrider.engine.sampling.noise import Lane, gumbel_noise, seed_keys
from outrider.params import SamplingParams

_MAX_SCORES = 2**23  # drawn from at once: noise takes 8 bytes each, and what makes it as much again
_FEW = 256  # of the likeliest tokens; they usually decide top_k and top_p without a sort


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """Sampling parameters of n rows of logits, on the device of the logits."""

    temperature: Tensor  # float32 [n]; 0: greedy
    top_k: Tensor  # int64 [n]; 0: all tokens
    top_p: Tensor  # float32 [n]
    min_p: Tensor  # float32 [n]
    seed: Tensor  # int64 [n, 2]: the two keys that the hash derives from the seed
    position: Tensor  # int64 [n]: absolute position of the token being drawn
    all_greedy: bool
    any_greedy: bool
    any_sorted: bool  # some row has top_k or top_p, which takes a sort
    any_min_p: bool

    @staticmethod
    def build(
        params: Sequence[SamplingParams],
        positions: Sequence[int],
        device: torch.device | str = "cpu",
        lanes: Sequence[Lane] | None = None,
    ) -> SamplingBatch:
        """Build one entry per row of logits, which draws the token at `positions[i]`.

        `lanes` are the streams of noise to draw with; None: the shared one.
        """
        assert len(params) == len(positions)

        def column(values: list[int] | list[float], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)

        greedy = [p.temperature == 0.0 for p in params]
        return SamplingBatch(
            temperature=column([p.temperature for p in params], torch.float32),
            top_k=column([p.top_k for p in params], torch.int64),
            top_p=column([p.top_p for p in params], torch.float32),
            min_p=column([p.min_p for p in params], torch.float32),
            seed=seed_keys([p.seed for p in params], lanes).to(device, non_blocking=True),
            position=column(list(positions), torch.int64),
            all_greedy=all(greedy),
            any_greedy=any(greedy),
            any_sorted=any(p.top_k > 0 or p.top_p < 1.0 for p in params),
            any_min_p=any(p.min_p > 0.0 for p in params),
        )

    def __getitem__(self, rows: slice) -> SamplingBatch:
        """Return the parameters of some of the rows."""
        return self._mapped(lambda column: column[rows], self.position[rows])

    def repeated(self, times: int, position: Tensor) -> SamplingBatch:
        """Repeat every row's parameters, for draws at `position` int64 [n * times]."""
        return self._mapped(lambda column: column.repeat_interleave(times, dim=0), position)

    def _mapped(self, change: Callable[[Tensor], Tensor], position: Tensor) -> SamplingBatch:
        return replace(
            self,
            temperature=change(self.temperature),
            top_k=change(self.top_k),
            top_p=change(self.top_p),
            min_p=change(self.min_p),
            seed=change(self.seed),
            position=position,
        )


Sample = Callable[[Tensor, SamplingBatch], Tensor]
"""`sample`, or a faster equal of it."""


def sample(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """Draw a token from each row of `logits` [n, vocab]: int64 [n], independent of other rows."""
    if batch.all_greedy:
        return logits.argmax(dim=-1)
    at_once = max(1, _MAX_SCORES // logits.shape[-1])
    if len(logits) > at_once:
        parts = [slice(i, i + at_once) for i in range(0, len(logits), at_once)]
        return torch.cat([sample(logits[part], batch[part]) for part in parts])
    scores = gumbel_noise(batch.seed, batch.position, logits.shape[-1])
    scores += process_logits(logits, batch)
    drawn = scores.argmax(dim=-1)
    if batch.any_greedy:
        return torch.where(batch.temperature == 0.0, logits.argmax(dim=-1), drawn)
    return drawn


def process_logits(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """Divide logits by temperature, and set tokens outside of top_k, top_p and min_p to -inf.

    [n, vocab] to float32 [n, vocab]. The filters apply in that order, each to what the one before
    left, at temperature T. Greedy rows (T = 0) are treated as T = 1; `sample` does not use them.
    top_k keeps ties with the k-th token; top_p keeps the fewest likeliest tokens whose
    probabilities reach top_p, and ties with the last of them. At least one token is always kept.
    """
    temperature = torch.where(batch.temperature == 0.0, 1.0, batch.temperature)
    scaled = logits.float() / temperature[:, None]
    if batch.any_sorted:
        threshold = _sorted_threshold(scaled, batch)
        scaled = scaled.masked_fill(scaled < threshold[:, None], -torch.inf)
    if batch.any_min_p:
        # prob < min_p * max prob  <=>  logit < max logit + log(min_p)
        floor = scaled.amax(dim=-1) + batch.min_p.log()
        scaled = scaled.masked_fill(scaled < floor[:, None], -torch.inf)
    return scaled


def _sorted_threshold(scaled: Tensor, batch: SamplingBatch) -> Tensor:
    """Return the smallest logit that top_k and top_p keep: [n, vocab] to [n].

    The likeliest tokens are looked at first, and all are sorted only where these do not decide.
    Both give the same bits, so that a row does not depend on its neighbours.
    """
    vocab_size = scaled.shape[-1]
    top_k = torch.where(batch.top_k == 0, vocab_size, batch.top_k).clamp(max=vocab_size)
    for count in (min(_FEW, vocab_size), vocab_size):
        descending = scaled.topk(count, dim=-1).values
        has_kth = top_k <= count
        kth = descending.gather(1, top_k.clamp(max=count)[:, None] - 1)
        kth = torch.where(has_kth[:, None], kth, -torch.inf)  # [n, 1]
        # Ties with the k-th token stay, so that the result does not depend on the order of a sort.
        weights = (scaled - descending[:, :1]).exp().masked_fill(scaled < kth, 0.0)
        mass = weights.sum(dim=-1, dtype=torch.float64)  # [n]
        reach = (descending - descending[:, :1]).exp().masked_fill(descending < kth, 0.0)
        reach = reach.cumsum(dim=-1, dtype=torch.float64)
        wanted = batch.top_p.double() * mass
        num_kept = 1 + (reach < wanted[:, None]).sum(dim=-1)
        has_pth = num_kept <= count
        last = descending.gather(1, num_kept.clamp(max=count)[:, None] - 1)
        pth = torch.where((has_pth & (batch.top_p < 1.0))[:, None], last, -torch.inf)
        decided = (has_kth | (batch.top_k == 0)) & (has_pth | (batch.top_p == 1.0))
        if count == vocab_size or bool(decided.all()):
            break
    return torch.maximum(kth, pth)[:, 0]
