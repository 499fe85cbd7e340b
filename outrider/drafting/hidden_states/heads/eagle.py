"""EAGLE-1 and EAGLE-2 (Li et al., arXiv 2401.15077 and 2406.16858), whose weights are the same.

A row is the embedding of the next token beside the target's state, both through one product. Its
first layer has no norm before attention. What comes out is a guess at the target's own state after
the final norm: the target's head reads it, and it is the next row's state.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from outrider.drafting.hidden_states.checkpoints import Checkpoint, TargetTensors
from outrider.drafting.hidden_states.heads.llama_head import LlamaHead
from outrider.drafting.hidden_states.heads.llama_layers import LlamaLayer, LlamaShape, Place
from outrider.engine.attention.base import StepAttention
from outrider.engine.layers.linear import Linear
from outrider.engine.layers.ops import LlamaOps, Use
from outrider.engine.model.loader import choose_llama_ops
from outrider.engine.model.pack import pack_linear
from outrider.errors import ConfigError
from outrider.features import FeatureSpec


def load_eagle(
    folder: Path,
    target_folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    *,
    max_model_len: int | None = None,
) -> EagleHead:
    """A checkpoint as `yuhuili/EAGLE-*`, with the embedding and the head of its target.

    Raises `ConfigError` for tensors that are missing, of a wrong shape or unknown.
    """
    checkpoint, target = Checkpoint(folder), TargetTensors(target_folder)
    place, ops = Place(dtype, device), choose_llama_ops(device, dtype)
    shape = LlamaShape.of(checkpoint.config, str(folder), max_model_len)
    hidden = shape.hidden_size
    if hidden != target.hidden_size:
        raise ConfigError(
            f"The module in {folder} was made for states of {hidden} numbers; those of the target "
            f"in {target_folder} have {target.hidden_size}."
        )
    weight = place.put(checkpoint.tensor("fc.weight", hidden, 2 * hidden))
    bias = place.put(checkpoint.tensor("fc.bias", hidden)) if "fc.bias" in checkpoint else None
    layers: list[LlamaLayer] = []
    norms: list[Tensor] = []
    for i in range(checkpoint.number("num_hidden_layers", 1)):
        prefix = f"layers.{i}."
        layers.append(LlamaLayer(checkpoint, prefix, shape, place, ops, input_width=hidden))
        if i:
            norms.append(place.put(checkpoint.tensor(f"{prefix}input_layernorm.weight", hidden)))
    checkpoint.check_all_taken(ignored=("embed_tokens.weight",))
    head = pack_linear(place.put(target.head()), None)
    fc = pack_linear(weight, bias)
    return EagleHead(shape, place, ops, layers, norms, target.embedding(), fc, head)


class EagleHead(LlamaHead):
    """A `RecurrentHead`."""

    projection = b""

    def __init__(
        self,
        shape: LlamaShape,
        place: Place,
        ops: LlamaOps,
        layers: list[LlamaLayer],
        norms: list[Tensor],
        embedding: Tensor,
        fc: Linear,
        head: Linear,
    ) -> None:
        super().__init__(shape, place, ops, layers, norms, embedding)
        self.features = FeatureSpec(hidden_size=shape.hidden_size, final_norm=True)
        self._fc = fc
        self._head = head
        self.uses = (Use(fc, alone=True), *self._layer_uses(), Use(head, alone=True))

    def begin(self, features: Tensor) -> Tensor:
        return features.to(self.dtype)

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
        return self._scores(self._head(outputs))
