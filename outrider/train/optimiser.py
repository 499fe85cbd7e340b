"""Muon for the matrices, AdamW for tables and norms, with one learning-rate scale."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn


class Muon:
    """Muon (Jordan et al. 2024) for matrices and AdamW for the rest, stepped together."""

    def __init__(
        self, module: nn.Module, table_names: tuple[str, ...], lr: float, table_lr: float
    ) -> None:
        matrices: list[nn.Parameter] = []
        rest: list[nn.Parameter] = []
        for name, weight in module.named_parameters():
            is_table = any(part in name for part in table_names)
            (rest if weight.dim() != 2 or is_table else matrices).append(weight)
        muon = torch.optim.Muon(matrices, lr, adjust_lr_fn="match_rms_adamw")
        adam = torch.optim.AdamW(rest, table_lr, betas=(0.9, 0.95), weight_decay=0.0, eps=1e-10)
        self._optimisers: dict[str, tuple[torch.optim.Optimizer, float]] = {
            "muon": (muon, lr),
            "adam": (adam, table_lr),
        }

    def step(self, scale: float) -> None:
        """Update with both learning rates multiplied by `scale`, and clear the gradients."""
        for optimiser, lr in self._optimisers.values():
            for group in optimiser.param_groups:
                group["lr"] = lr * scale
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {name: each.state_dict() for name, (each, _) in self._optimisers.items()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore a checkpoint."""
        for name, (optimiser, _) in self._optimisers.items():
            optimiser.load_state_dict(state[name])


def schedule(progress: float, warmup: float = 0.03, decay: float = 0.7) -> float:
    """Warm up, stay, then fall linearly to zero over the last `decay` of the run."""
    if progress < warmup:
        return max(progress / warmup, 0.01)
    return min(1.0, max(0.0, (1 - progress) / decay))
