"""How far guesses are from what the target would say."""

from __future__ import annotations

import torch
from torch import Tensor

STEP_DECAY = 0.8
"""Later drafted tokens weigh less: they count only where all before them were right."""


def guess_loss(guess: Tensor, wanted: Tensor, first: Tensor, weight: Tensor) -> Tensor:
    """Mean of forward KL (up to a constant), the target's first choice, and total variation.

    `guess` and `wanted` are logits `[n, draft vocabulary]`; `first [n]` is the target's first
    choice among them; `weight [n]` is 0 where the target's first choice is outside. Total
    variation is what coupled sampling and rejection lose.
    """
    probs = wanted.float().softmax(-1)
    log_guess = guess.float().log_softmax(-1)
    cross = -(probs * log_guess).sum(-1)
    hard = -log_guess.gather(-1, first[:, None])[:, 0]
    variation = 0.5 * (probs - log_guess.exp()).abs().sum(-1)
    total = ((cross + 0.5 * hard + 0.5 * variation) * weight).sum()
    return total / weight.sum().clamp(min=1)


def step_weights(length: int, rows: int, step: int, device: torch.device) -> Tensor:
    """1 where row p of a step belongs to a chain (p >= step): `[rows * length]`."""
    inside = torch.arange(length, device=device) >= step
    return inside.float().repeat(rows)
