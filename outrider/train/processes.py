"""Data-parallel training: the messages between processes that `torchrun` started."""

from __future__ import annotations

import os

import torch
from torch import Tensor, distributed, nn


class Processes:
    """One process of `world_size`, which sends nothing if it is alone."""

    def __init__(self) -> None:
        self.world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self.rank = int(os.environ.get("RANK", "0"))
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self.device = torch.device("cpu")
        if torch.cuda.is_available():
            self.device = torch.device("cuda", local_rank)
            torch.cuda.set_device(self.device)
        if self.world_size > 1:
            distributed.init_process_group("nccl" if self.device.type == "cuda" else "gloo")

    def agree(self, value: float) -> float:
        """Return the first process's value in all."""
        if self.world_size == 1:
            return value
        shared = torch.tensor([value], dtype=torch.float64, device=self.device)
        distributed.broadcast(shared, 0)
        return float(shared)

    def average_gradients(self, module: nn.Module) -> None:
        """Give every process the mean of all gradients, by one reduction."""
        if self.world_size == 1:
            return
        grads: list[Tensor] = [w.grad for w in module.parameters() if w.grad is not None]
        joined = torch.cat([grad.reshape(-1) for grad in grads])
        distributed.all_reduce(joined)
        joined /= self.world_size
        means = torch.split(joined, [grad.numel() for grad in grads])
        for grad, mean in zip(grads, means, strict=True):
            grad.copy_(mean.view_as(grad))

    def share_weights(self, module: nn.Module) -> None:
        """Give every process the first one's weights."""
        if self.world_size > 1:
            for weight in module.parameters():
                distributed.broadcast(weight.data, 0)

    def share(self, rows: Tensor) -> Tensor:
        """Return this process's part of rows that all have: equal parts, interleaved."""
        return rows[self.rank :: self.world_size][: len(rows) // self.world_size]

    def gather(self, rows: Tensor) -> Tensor:
        """Return the parts of all, of one shape, one after the other on the host."""
        if self.world_size == 1:
            return rows.cpu()
        part = rows.to(self.device).contiguous()
        parts = [torch.empty_like(part) for _ in range(self.world_size)]
        distributed.all_gather(parts, part)
        return torch.cat(parts).cpu()

    def wait(self) -> None:
        """Wait until all are here."""
        if self.world_size > 1:
            distributed.barrier()

    def close(self) -> None:
        """Leave the group."""
        if self.world_size > 1:
            distributed.destroy_process_group()
