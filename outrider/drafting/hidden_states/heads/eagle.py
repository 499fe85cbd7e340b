"""EAGLE-1 and EAGLE-2 (Li et al., arXiv 2401.15077 and 2406.16858), whose weights are the same.

A row is the embedding of the next token beside the target's state, both through one product. The
first layer has no norm before attention. The output is a guess at the target's own state after the
final norm: the target's head reads it, and it is the next row's state.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from outrider.drafting.hidden_states.checkpoints import Checkpoint, TargetTensors
from outrider.drafting.hidden_states.heads.base import Place, spread
from outrider.drafting.hidden_states.heads.llama import LlamaHead, LlamaStack
from outrider.engine.attention.base import StepAttention
from outrider.engine.layers.ops import Use
from outrider.features import FeatureSpec


def load_eagle(
    folder: Path,
    target_folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    *,
    max_model_len: int | None = None,
) -> EagleHead:
    """Read a checkpoint like `yuhuili/EAGLE-*`, with the embedding and the head of its target.

    Raises `ConfigError` for tensors that are missing, of a wrong shape or unknown.
    """
    checkpoint, target = Checkpoint(folder), TargetTensors(target_folder)
    target.check_trained_for(folder, checkpoint.number("hidden_size", 4096))  # Llama's default
    place = Place.of(dtype, device)
    prefixes = [f"layers.{i}." for i in range(checkpoint.number("num_hidden_layers", 1))]
    positions = target.max_positions
    stack = LlamaStack(
        checkpoint, checkpoint.config, prefixes, place, max_model_len, target_len=positions
    )
    head = EagleHead(checkpoint, target, stack, place)
    checkpoint.check_all_taken(ignored=("embed_tokens.weight",))  # a copy of the target's
    return head


class EagleHead(LlamaHead):
    """A module of EAGLE-1 or EAGLE-2."""

    def __init__(
        self, checkpoint: Checkpoint, target: TargetTensors, stack: LlamaStack, place: Place
    ) -> None:
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
