"""Standard Gumbel noise from a counter-based integer hash of seed, position and token.

docs/sampling.md gives the hash bit for bit. It is integer arithmetic, so every device has the same
bits.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_FACTOR_1 = 0x21F0AAAD
_FACTOR_2 = 0x735A2D97
_GOLDEN = 0x9E3779B9  # tells the two halves of a key, and the lanes, from one another


class Lane(enum.IntEnum):
    """Independent streams of noise at one position of one request; see docs/sampling.md."""

    SHARED = 0  # g: the target's coupled draw, and a proposer's guess of it
    DRAFT = 1  # a proposer's draw under rejection
    ACCEPT = 2  # the acceptance of that draw
    RECOVER = 3  # the target's draw under rejection where nothing was accepted


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
