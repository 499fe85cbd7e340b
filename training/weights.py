"""Checkpoints as they are published: bf16, matrices rounded to four mantissa bits.

The rounding (about 1 % of a weight's size) halves what the files take once compressed, in git
and in images; the draft is distilled from, and everything is measured on, the rounded weights.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from outrider.train.export import rounded
from training.config import ModelConfig
from training.model import Llama

MANTISSA_BITS = 4


def published(checkpoint: Path) -> dict[str, Tensor]:
    """The tensors that are exported."""
    saved = torch.load(checkpoint, map_location="cpu", weights_only=False)["model"]
    return {name: rounded(weight, MANTISSA_BITS) for name, weight in saved.items()}


def load(checkpoint: Path, config: ModelConfig, device: torch.device) -> Llama:
    """A model with the published weights."""
    model = Llama(config)
    model.bfloat16().load_state_dict(published(checkpoint))
    return model.to(device).eval().requires_grad_(False)
