"""EAGLE-3 (Li et al., arXiv 2503.01840): reads three states of the target, by one product.

Its first layer takes the next token's embedding beside the state, each normed; the state is also
the residual. What goes back as the next row's state is the output before the last norm.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.drafting.hidden_states.checkpoints import Checkpoint, TargetTensors
from outrider.drafting.hidden_states.heads.base import spread
from outrider.drafting.hidden_states.heads.eagle3_format import (
    Eagle3Format,
    draft_vocabulary,
    matrix_bytes,
)
from outrider.drafting.hidden_states.heads.llama_head import LlamaHead
from outrider.drafting.hidden_states.heads.llama_layers import LlamaLayer, LlamaShape, Place
from outrider.engine.attention.base import StepAttention
from outrider.engine.layers.ops import LlamaOps, Use
from outrider.engine.model.loader import choose_llama_ops
from outrider.engine.model.pack import pack_linear
from outrider.errors import ConfigError
from outrider.features import FeatureSpec


@dataclass(frozen=True, slots=True)
class Eagle3Weights:
    """What is not in the layers."""

    embedding: Tensor  # [vocab, hidden]
    fc: Tensor  # [hidden, aux * target hidden]
    fc_bias: Tensor | None
    whole_norm: Tensor | None  # [aux * target hidden]: before fc, of all aux states together
    part_norms: Tensor | None  # [aux, target hidden]: before fc, of each
    token_norm: Tensor  # [hidden]
    state_norm: Tensor  # [hidden]
    layer_norms: tuple[Tensor, ...]  # [hidden] each: before the layers after the first
    norm: Tensor  # [hidden]
    head: Tensor  # [draft vocab, hidden]
    target_ids: Tensor | None  # int64 [draft vocab]; None: all of the target's, in order


def load_eagle3(
    folder: Path,
    target_folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    *,
    max_model_len: int | None = None,
    project: bool = False,
) -> Eagle3Head:
    """A checkpoint as `yuhuili/EAGLE3-*` or of `speculators`; what it lacks is the target's.

    With `project` the scorer is to apply fc, where nothing comes before it: one state is sent
    instead of three. Raises `ConfigError` for tensors that are missing, of a wrong shape or
    unknown, and settings that do not fit them.
    """
    checkpoint, target = Checkpoint(folder), TargetTensors(target_folder)
    found = Eagle3Format.of(checkpoint)
    place, ops = Place(dtype, device), choose_llama_ops(device, dtype)
    shape = LlamaShape.of(found.layer_config, str(folder), max_model_len)
    hidden, target_hidden = shape.hidden_size, target.hidden_size
    expected = checkpoint.config.get("target_hidden_size") or hidden
    if expected != target_hidden:
        raise ConfigError(
            f"The module in {folder} was made for states of {expected} numbers; those of the "
            f"target in {target_folder} have {target_hidden}."
        )
    aux = found.aux_layers(target.num_layers)
    width = len(aux) * target_hidden

    def vector(name: str, size: int = hidden) -> Tensor:
        return place.put(checkpoint.tensor(name, size))

    embedding = found.optional("embed_tokens.weight", target.vocab_size, hidden)
    if embedding is None:
        if hidden != target_hidden:
            raise ConfigError(
                f"{folder} holds no tensor embed_tokens.weight, which it needs: the target's "
                f"embedding is {target_hidden} wide, its own layers {hidden}."
            )
        embedding = target.embedding()
    head = found.optional("lm_head.weight")
    if head is None:
        if hidden != target_hidden:
            raise ConfigError(f"{folder} holds no tensor lm_head.weight, which it needs.")
        head = target.head()
    elif head.shape[1:] != (hidden,):
        rows = head.shape[:1]
        checkpoint.tensor(found.name("lm_head.weight"), *rows, hidden)  # says what is wrong
    target_ids = draft_vocabulary(found, len(head), target)
    whole_norm = part_norms = None
    if found.flag("norm_before_fc", "input_norm.weight"):
        whole_norm = vector(found.name("input_norm.weight"), width)
    elif found.flag("fc_norm", "fc_norm.0.weight"):
        norms = [vector(found.name(f"fc_norm.{i}.weight"), target_hidden) for i in range(len(aux))]
        part_norms = torch.stack(norms)
    bias = found.optional("fc.bias", hidden)
    layers = [LlamaLayer(checkpoint, found.first_layer, shape, place, ops, input_width=2 * hidden)]
    layer_norms: list[Tensor] = []
    for i in range(1, int(found.layer_config.get("num_hidden_layers") or 1)):
        prefix = found.layer_prefix(i)
        layers.append(LlamaLayer(checkpoint, prefix, shape, place, ops, input_width=hidden))
        layer_norms.append(vector(f"{prefix}input_layernorm.weight"))
    weights = Eagle3Weights(
        embedding=embedding,
        fc=checkpoint.tensor(found.name("fc.weight"), hidden, width),
        fc_bias=None if bias is None else place.put(bias),
        whole_norm=whole_norm,
        part_norms=part_norms,
        token_norm=vector(f"{found.first_layer}input_layernorm.weight"),
        state_norm=vector(f"{found.first_layer}hidden_norm.weight"),
        layer_norms=tuple(layer_norms),
        norm=vector(found.name("norm.weight")),
        head=place.put(head),
        target_ids=None if target_ids is None else target_ids.to(device),
    )
    checkpoint.check_all_taken()
    return Eagle3Head(
        shape,
        place,
        ops,
        layers,
        weights,
        FeatureSpec(hidden_size=target_hidden, layers=aux),
        norm_before_residual=found.flag("norm_before_residual"),
        norm_output=found.flag("norm_output"),
        project=project,
    )


class Eagle3Head(LlamaHead):
    """A `RecurrentHead`."""

    def __init__(
        self,
        shape: LlamaShape,
        place: Place,
        ops: LlamaOps,
        layers: list[LlamaLayer],
        weights: Eagle3Weights,
        features: FeatureSpec,
        *,
        norm_before_residual: bool = False,
        norm_output: bool = False,
        project: bool = False,
    ) -> None:
        """`features` are those without a projection."""
        super().__init__(shape, place, ops, layers, weights.layer_norms, weights.embedding)
        self._weights = weights
        self._norm_before_residual = norm_before_residual
        self._norm_output = norm_output
        self._head = pack_linear(weights.head, None)
        self.projection = b""
        if project and weights.whole_norm is None and weights.part_norms is None:
            self.projection, digest = matrix_bytes(weights.fc)
            dim = len(weights.fc)
            features = replace(features, projection_dim=dim, projection_sha256=digest)
        self.features = features
        self._fc = None if self.projection else pack_linear(place.put(weights.fc), weights.fc_bias)
        self.uses = (
            *(() if self._fc is None else (Use(self._fc, alone=True),)),
            *self._layer_uses(),
            Use(self._head, None if norm_output else weights.norm, alone=norm_output),
        )

    def begin(self, features: Tensor) -> Tensor:
        weights, eps = self._weights, self._shape.eps
        x = features.to(self.dtype)
        if self._fc is None:
            return x if weights.fc_bias is None else x + weights.fc_bias
        if weights.whole_norm is not None:
            x = self._ops.rms_norm(x, weights.whole_norm, eps)
        elif weights.part_norms is not None:
            parts = x.view(len(x), *weights.part_norms.shape)
            x = F.rms_norm(parts, parts.shape[-1:], None, eps).mul_(weights.part_norms).flatten(1)
        return self._fc(x)

    def forward(
        self,
        token_ids: Tensor,
        states: Tensor,
        attention: StepAttention,
        step: int,  # noqa: ARG002
    ) -> Tensor:
        ops, weights, eps = self._ops, self._weights, self._shape.eps
        tokens = ops.rms_norm(self._embed(token_ids), weights.token_norm, eps)
        normed = ops.rms_norm(states, weights.state_norm, eps)
        qkv = self._layers[0].qkv(torch.cat((tokens, normed), dim=-1))
        x = normed if self._norm_before_residual else states
        x = self._run_layers(qkv, x, attention)
        return ops.rms_norm(x, weights.norm, eps) if self._norm_output else x

    def logits(self, outputs: Tensor) -> Tensor:
        if self._norm_output:
            known = self._scores(self._head(outputs))
        else:
            weights = self._weights
            normed = self._ops.norm_linear(outputs, weights.norm, self._shape.eps, self._head)
            known = self._scores(normed)
        return spread(known, self._weights.target_ids, self.vocab_size)
