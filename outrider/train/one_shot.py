"""Heads without attention: Medusa (arXiv 2401.10774) and IBM's MLP speculator (2404.19124)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.train.head import Export, Head
from outrider.train.layers import shift_rows
from outrider.train.target import Target, TargetBatch


class Residual(nn.Linear):
    """x + SiLU(A x + b), the identity at first."""

    def __init__(self, size: int) -> None:
        super().__init__(size, size)
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.weight.dtype)
        return x + F.silu(super().forward(x))


class Medusa(Head):
    """One residual block per drafted position, before the target's own head (Medusa-1).

    Written as vLLM reads it, with `original_lm_head`: no copies of the head in the file.
    """

    def __init__(self, target: Target, num_heads: int) -> None:
        super().__init__()
        self.size, self.vocab_size = int(target.config.hidden_size), int(target.config.vocab_size)
        self.head = target.head
        self.blocks = nn.ModuleList(Residual(self.size) for _ in range(num_heads))

    def unroll(self, batch: TargetBatch, num_steps: int) -> Iterator[Tensor]:
        for step, block in enumerate(self.blocks[:num_steps]):
            x = block(shift_rows(batch.hidden[:, :-1], step))
            yield F.linear(x, self.head.to(x.dtype))

    def export(self) -> Export:
        """Return tensors and config of vLLM's `MedusaModel`."""
        tensors = {
            f"blocks.{index}.layers.0.{name}": weight.detach()
            for index, block in enumerate(self.blocks)
            for name, weight in block.named_parameters()
        }
        count = len(self.blocks)
        config: dict[str, Any] = {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "hidden_size": self.size,
            "vocab_size": self.vocab_size,
            "truncated_vocab_size": self.vocab_size,
            "num_heads": count,
            "medusa_num_heads": count,
            "num_hidden_layers": 1,
            "medusa_num_layers": 1,
            "medusa_fc_bias": True,
            "original_lm_head": True,
        }
        return Export(tensors, config)


class SpeculatorNorm(nn.Module):
    """The speculator's LN, computed in fp32: the mean is not subtracted."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight.float() * _normed(x.float()) + self.bias.float()).to(x.dtype)


def _normed(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class MlpSpeculator(Head):
    """A recurrence over drafted tokens; tied: all steps but the first projection share weights."""

    table_names: ClassVar = ("emb.", "head.")

    def __init__(self, target: Target, num_steps: int, inner_size: int) -> None:
        super().__init__()
        self.size, self.vocab_size = int(target.config.hidden_size), int(target.config.vocab_size)
        self.num_steps, self.inner_size = num_steps, inner_size
        embedding = nn.Embedding(self.vocab_size, inner_size)
        nn.init.normal_(embedding.weight, std=1 / math.sqrt(inner_size))
        self.emb = nn.ModuleList([embedding])
        self.proj = nn.ModuleList([nn.Linear(self.size, inner_size, bias=False)])
        if num_steps > 1:
            self.proj.append(nn.Linear(inner_size, inner_size, bias=False))
        self.head = nn.ModuleList([nn.Linear(inner_size, self.vocab_size, bias=False)])
        self.ln = nn.ModuleList([SpeculatorNorm(inner_size)])

    def unroll(self, batch: TargetBatch, num_steps: int) -> Iterator[Tensor]:
        """Yield guesses: row p of step k takes token p + 1, and the state of row p - 1."""
        state_weight = 0.5 ** (0.5 / self.num_steps)
        token_weight = math.sqrt((1 - state_weight**2) * self.inner_size / 2)
        embedded = self.emb[0](batch.token_ids[:, 1:])
        state = _normed(batch.hidden[:, :-1].float()).to(embedded.dtype) / math.sqrt(2)
        for step in range(min(num_steps, self.num_steps)):
            x = self.proj[min(step, 1)](state)
            x = state_weight * x + token_weight * embedded.to(x.dtype)
            x = F.gelu(self.ln[0](x))
            yield self.head[0](x)
            state = shift_rows(x)

    def export(self) -> Export:
        """Return tensors and config of `ibm-fms` speculators; shared weights are stored once."""
        tensors = {
            "speculator." + name: weight.detach() for name, weight in self.named_parameters()
        }
        config: dict[str, Any] = {
            "architectures": ["MLPSpeculatorPreTrainedModel"],
            "model_type": "mlp_speculator",
            "emb_dim": self.size,
            "inner_dim": self.inner_size,
            "n_predict": self.num_steps,
            "n_candidates": self.num_steps,
            "top_k_tokens_per_head": [4, 3, 2, 2, *[1] * self.num_steps][: self.num_steps],
            "tie_weights": True,
            "scale_input": True,
            "vocab_size": self.vocab_size,
        }
        return Export(tensors, config)
