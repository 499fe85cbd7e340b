"""EAGLE-1 and EAGLE-2 (Li et al., arXiv 2401.15077 and 2406.16858), whose weights are the same.

A row is the embedding of the next token beside the target's state, both through one product. The
first layer has no norm before attention. The output is a guess at the target's own state after the
final norm: the target's head reads it, and it is the next row's state.
"""

from __future__ import annotations

from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from outrider.drafting.hidden_states.checkpoints import Checkpoint
from outrider.drafting.hidden_states.heads.base import HeadSetup, spread
from outrider.drafting.hidden_states.heads.llama import LlamaHead, LlamaStack
from outrider.engine.attention.base import StepAttention
from outrider.engine.layers.ops import Use
from outrider.features import FeatureSpec


class EagleHead(LlamaHead):
    """A module of EAGLE-1 or EAGLE-2."""

    @classmethod
    def read(cls, folder: Path, setup: HeadSetup) -> Self:
        """Read a checkpoint like `yuhuili/EAGLE-*`. Raises `ConfigError`."""
        checkpoint = Checkpoint(folder)
        head = cls(checkpoint, setup)
        checkpoint.check_all_taken(ignored=("embed_tokens.weight",))  # a copy of the target's
        return head

    def __init__(self, checkpoint: Checkpoint, setup: HeadSetup) -> None:
        target, place = setup.target, setup.place
        width = checkpoint.number("hidden_size", 4096)  # Llama's default
        target.check_trained_for(checkpoint.folder, width)
        prefixes = [f"layers.{i}." for i in range(checkpoint.number("num_hidden_layers", 1))]
        stack = LlamaStack(checkpoint, checkpoint.config, prefixes, setup)
        super().__init__(stack, place, target.embedding())
        hidden = stack.shape.hidden_size
        self.features = FeatureSpec(hidden_size=hidden, final_norm=True)
        # Published files differ, and few say it in config.json.
        biased = "fc.bias" in checkpoint or checkpoint.config.get("bias") is True
        bias = checkpoint.tensor("fc.bias", hidden) if biased else None
        self._fc = place.linear(checkpoint.tensor("fc.weight", hidden, 2 * hidden), bias)
        self._head = place.linear(target.head())
        self.uses = (Use(self._fc, alone=True), *self._layer_uses, Use(self._head, alone=True))

    def forward(
        self,
        token_ids: Tensor,
        states: Tensor,
        attention: StepAttention,
        step: int,  # noqa: ARG002
    ) -> Tensor:
        x = self._fc(torch.cat((self._embed(token_ids), states), dim=-1))
        return self._run_layers(self._layers[0].qkv(x), x, attention)

    def logits(self, outputs: Tensor) -> Tensor:
        return spread(self._head(outputs), None, self.vocab_size)
