"""Muon for the matrices, AdamW for tables and norms, with one learning-rate scale."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def orthogonalise(update: Tensor) -> Tensor:
    """Newton-Schulz iteration (Jordan et al. 2024): the nearest semi-orthogonal matrices."""
    x = update.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    result: Tensor = x.mT if tall else x
    return result


class Muon:
    """Momentum, orthogonalised per matrix; matrices of one shape are handled as one stack."""

    def __init__(
        self, module: nn.Module, table_names: tuple[str, ...], lr: float, table_lr: float
    ) -> None:
        self.lr, self.table_lr, self.decay, self.beta = lr, table_lr, 0.1, 0.95
        groups: dict[tuple[int, ...], list[nn.Parameter]] = {}
        rest = []
        for name, weight in module.named_parameters():
            if weight.dim() == 2 and not any(part in name for part in table_names):
                groups.setdefault(tuple(weight.shape), []).append(weight)
            else:
                rest.append(weight)
        self.groups = list(groups.values())
        self.momenta = [torch.zeros_like(torch.stack(list(group))) for group in self.groups]
        self.adam = torch.optim.AdamW(
            rest, lr=table_lr, betas=(0.9, 0.95), weight_decay=0.0, eps=1e-10
        )

    @torch.no_grad()
    def step(self, scale: float) -> None:
        """One update with both learning rates multiplied by `scale`; clears the gradients."""
        for group in self.adam.param_groups:
            group["lr"] = self.table_lr * scale
        self.adam.step()
        self.adam.zero_grad(set_to_none=True)
        lr = self.lr * scale
        for weights, momentum in zip(self.groups, self.momenta, strict=True):
            grads = torch.stack([w.grad for w in weights if w.grad is not None])
            momentum.lerp_(grads, 1 - self.beta)
            update = orthogonalise(grads.lerp(momentum, self.beta))
            size = 0.2 * max(update.shape[-2:]) ** 0.5
            for weight, change in zip(weights, update, strict=True):
                weight.mul_(1 - lr * self.decay)
                weight.add_(change.to(weight.dtype), alpha=-lr * size)
                weight.grad = None

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"momenta": self.momenta, "adam": self.adam.state_dict()}

    def load(self, state: dict[str, Any]) -> None:
        """Restore a checkpoint."""
        for momentum, saved in zip(self.momenta, state["momenta"], strict=True):
            momentum.copy_(saved)
        self.adam.load_state_dict(state["adam"])


def schedule(progress: float, warmup: float = 0.03, decay: float = 0.7) -> float:
    """Warm up, stay, then fall linearly to zero over the last `decay` of the run."""
    if progress < warmup:
        return max(progress / warmup, 0.01)
    return min(1.0, max(0.0, (1 - progress) / decay))
