"""Coupled sampling: a drawn token is a function of logits, seed and position only.

    y = argmax(processed_logits / T + g(seed, position, token))

with g standard Gumbel noise from a counter-based integer hash (docs/sampling.md gives it bit for
bit). The Gumbel-max trick makes y an exact draw from softmax(processed_logits / T). Because a
proposer can add the same g to its own logits, the two agree with probability at least
(1 - TV) / (1 + TV) (Daliri et al., arXiv 2408.07978), and a draft can never change the text.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from outrider.params import SamplingParams

_MASK = 0xFFFFFFFF
_FACTOR_1 = 0x21F0AAAD
_FACTOR_2 = 0x735A2D97
_GOLDEN = 0x9E3779B9  # tells the two halves of a key, and the lanes, from one another
_MAX_SCORES = 2**23  # drawn from at once: noise takes 8 bytes each, and what makes it as much again
_FEW = 256  # of the likeliest tokens; they usually decide top_k and top_p without a sort


class Lane(enum.IntEnum):
    """Independent streams of noise at one position of one request; see docs/sampling.md."""

    SHARED = 0  # g: the target's coupled draw, and a proposer's guess of it
    DRAFT = 1  # a proposer's draw under rejection
    ACCEPT = 2  # the acceptance of that draw
    RECOVER = 3  # the target's draw under rejection where nothing was accepted


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


def seed_keys(seeds: Sequence[int], lanes: Sequence[Lane] | None = None) -> Tensor:
    """Return the keys of uint64 seeds for `SamplingBatch.seed`: int64 [n, 2], on the host."""
    lanes = (Lane.SHARED,) * len(seeds) if lanes is None else lanes
    keys = [keys_of_seed(seed, lane) for seed, lane in zip(seeds, lanes, strict=True)]
    return torch.tensor(keys, dtype=torch.int64).view(-1, 2)


def lane_keys(keys: Tensor, lane: Lane) -> Tensor:
    """Return the keys of another lane: from those of `Lane.SHARED`, int64 [n, 2] each."""
    return _mix(keys ^ (lane * _GOLDEN & _MASK))


def gumbel_noise(seed: Tensor, position: Tensor, vocab_size: int) -> Tensor:
    """Return Gumbel noise g(seed, position, token): int64 [n, 2], [n] to float64 [n, vocab].

    g = -log(-log(u)) with u = (h + 0.5) / 2^32 and h the 32-bit hash of docs/sampling.md. The
    hash is integer arithmetic, so h and u have the same bits on every device.
    """
    return _gumbel(_uniforms(seed, position, _mixed_tokens(vocab_size, seed.device)))


def token_noise(seed: Tensor, position: Tensor, tokens: Tensor) -> Tensor:
    """Return `gumbel_noise` of some tokens: int64 [n, 2], [n], [n, m] to float64 [n, m]."""
    return _gumbel(_uniforms(seed, position, _mix(tokens)))


def uniforms(seed: Tensor, position: Tensor) -> Tensor:
    """Return a number u(seed, position) in (0, 1) each: int64 [n, 2], [n] to float64 [n]."""
    return _uniforms(seed, position, _mixed_tokens(1, seed.device))[:, 0]


def _uniforms(seed: Tensor, position: Tensor, mixed_tokens: Tensor) -> Tensor:
    key = _mix(seed ^ position[:, None])  # [n, 2]
    mixed = mixed_tokens ^ key[:, :1]
    mixed.add_(key[:, 1:]).bitwise_and_(_MASK)
    u = _mix(mixed).to(torch.float64)
    u += 0.5
    u *= 2.0**-32
    return u


def _gumbel(u: Tensor) -> Tensor:
    return u.log_().neg_().log_().neg_()


def _mix(x: Tensor) -> Tensor:
    """Apply a bijection of 32-bit integers with full avalanche, from Wellons' hash-prospector.

    Both factors are below 2^31, so products of 32-bit values never overflow int64.
    """
    x = x ^ (x >> 16)
    x.mul_(_FACTOR_1).bitwise_and_(_MASK)
    x.bitwise_xor_(x >> 15)
    x.mul_(_FACTOR_2).bitwise_and_(_MASK)
    return x.bitwise_xor_(x >> 15)


def _mix_int(x: int) -> int:
    """Apply `_mix` to one number."""
    x ^= x >> 16
    x = x * _FACTOR_1 & _MASK
    x ^= x >> 15
    x = x * _FACTOR_2 & _MASK
    return x ^ (x >> 15)


@lru_cache(maxsize=4096)
def keys_of_seed(seed: int, lane: Lane = Lane.SHARED) -> tuple[int, int]:
    """Return the keys of one uint64 seed, as `seed_keys` has them."""
    low, high = seed & _MASK, seed >> 32
    first, second = _mix_int(_mix_int(low) ^ high), _mix_int(_mix_int(high ^ _GOLDEN) ^ low)
    if lane is Lane.SHARED:
        return first, second
    salt = lane * _GOLDEN & _MASK
    return _mix_int(first ^ salt), _mix_int(second ^ salt)


@lru_cache(maxsize=8)
def _mixed_tokens(vocab_size: int, device: torch.device) -> Tensor:
    return _mix(torch.arange(vocab_size, device=device))
