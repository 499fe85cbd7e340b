"""Data-parallel training: what the processes that `torchrun` started say to each other."""

from __future__ import annotations

import os

import torch
from torch import Tensor, distributed, nn


class Processes:
    """One process of `world_size`; alone, it says nothing.

    Heads are small: one reduction of all gradients as one vector is the whole exchange.
    """

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
        """The first process's value, for all."""
        if self.world_size == 1:
            return value
        shared = torch.tensor([value], dtype=torch.float64, device=self.device)
        distributed.broadcast(shared, 0)
        return float(shared)

    def average_gradients(self, module: nn.Module) -> None:
        """Every process gets the mean of all."""
        if self.world_size == 1:
            return
        grads: list[Tensor] = [w.grad for w in module.parameters() if w.grad is not None]
        joined = torch.cat([grad.reshape(-1) for grad in grads])
        distributed.all_reduce(joined)
        joined /= self.world_size
        at = 0
        for grad in grads:
            grad.copy_(joined[at : at + grad.numel()].view_as(grad))
            at += grad.numel()

    def share_weights(self, module: nn.Module) -> None:
        """Every process gets the first one's."""
        if self.world_size > 1:
            for weight in module.parameters():
                distributed.broadcast(weight.data, 0)

    def share(self, rows: Tensor) -> Tensor:
        """This process's part of rows that all have: every `world_size`-th, as many for each."""
        return rows[self.rank :: self.world_size][: len(rows) // self.world_size]

    def gather(self, rows: Tensor) -> Tensor:
        """The parts of all, one after the other; they are of one shape. On the host."""
        if self.world_size == 1:
            return rows.cpu()
        part = rows.to(self.device).contiguous()
        parts = [torch.empty_like(part) for _ in range(self.world_size)]
        distributed.all_gather(parts, part)
        return torch.cat(parts).cpu()

    def wait(self) -> None:
        """Until all are here."""
        if self.world_size > 1:
            distributed.barrier()

    def close(self) -> None:
        """Leaves the group."""
        if self.world_size > 1:
            distributed.destroy_process_group()
