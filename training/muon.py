"""Muon for the matrices, AdamW for embeddings and norms, with one learning-rate scale."""

from __future__ import annotations

import torch
from torch import Tensor, nn


@torch.compile(disable=not torch.cuda.is_available())
def orthogonalise(update: Tensor) -> Tensor:
    """Newton-Schulz iteration: the nearest (semi-)orthogonal matrices of a stack."""
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
        self, model: nn.Module, lr: float, embed_lr: float, decay: float = 0.1, beta: float = 0.95
    ) -> None:
        self.lr, self.decay, self.beta = lr, decay, beta
        groups: dict[tuple[int, ...], list[nn.Parameter]] = {}
        rest = []
        for name, weight in model.named_parameters():
            if weight.dim() == 2 and "embed" not in name:
                groups.setdefault(tuple(weight.shape), []).append(weight)
            else:
                rest.append(weight)
        self.groups = list(groups.values())
        self.momenta = [torch.zeros_like(torch.stack(list(g))) for g in self.groups]
        self.adam = torch.optim.AdamW(
            rest, lr=embed_lr, betas=(0.9, 0.95), weight_decay=0.0, eps=1e-10
        )
        self.embed_lr = embed_lr

    @torch.no_grad()
    def step(self, scale: float) -> None:
        """One update with both learning rates multiplied by `scale`; clears the gradients."""
        for group in self.adam.param_groups:
            group["lr"] = self.embed_lr * scale
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

    def state(self) -> dict[str, object]:
        """What a checkpoint keeps."""
        return {"momenta": self.momenta, "adam": self.adam.state_dict()}

    def load(self, state: dict[str, object]) -> None:
        """Restore a checkpoint."""
        self.momenta = state["momenta"]  # type: ignore[assignment]
        self.adam.load_state_dict(state["adam"])  # type: ignore[arg-type]


def schedule(progress: float, warmup: float = 0.03, decay: float = 0.6) -> float:
    """Warm up, stay, then fall linearly to zero over the last `decay` of the run."""
    if progress < warmup:
        return max(progress / warmup, 0.01)
    return min(1.0, max(0.0, (1 - progress) / decay))
